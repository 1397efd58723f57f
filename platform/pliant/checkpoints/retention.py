"""Which checkpoints go."""

import shutil
from pathlib import Path

from pliant.checkpoints.manifest import MANIFEST
from pliant.checkpoints.reader import committed
from pliant.checkpoints.writer import age


def prune(root: Path, keep: int) -> list[Path]:
    """Removes committed checkpoints beyond the newest `keep`, those that the newest one's attempt
    passed over, and what dead attempts left half written. Call it when nobody writes."""
    found = committed(root)
    passed_over = [path for path in found[1:] if _step(path) >= _step(found[0])]
    good = [path for path in found if path not in passed_over]
    orphans = [
        path
        for path in root.iterdir()
        if path.is_dir() and age(path) is not None and not (path / MANIFEST).is_file()
    ]
    doomed = good[keep:] + passed_over + orphans
    for directory in doomed:
        # The marker goes first: a half-removed checkpoint must not look whole.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
    return doomed


def _step(directory: Path) -> int:
    when = age(directory)
    assert when is not None
    return when[1]
