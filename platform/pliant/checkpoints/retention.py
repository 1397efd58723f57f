"""Which checkpoints go."""

import shutil
from pathlib import Path

from pliant.checkpoints.manifest import MANIFEST
from pliant.checkpoints.reader import committed


def prune(root: Path, keep: int) -> list[Path]:
    """Removes committed checkpoints beyond the newest `keep`, and what dead attempts left half
    written. Call it when nobody writes."""
    good = committed(root)
    orphans = [p for p in root.iterdir() if p.is_dir() and not (p / MANIFEST).is_file()]
    doomed = good[keep:] + orphans
    for directory in doomed:
        # The marker goes first: a half-removed checkpoint must not look whole.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
    return doomed
