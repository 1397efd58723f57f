"""The machinery of `make chaos` itself, and a few faults on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_job_that_was_struck_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "chaos", "--seed", "11", "--faults", "3", "--nodes", "1", "1"),
        *("--kinds", "KillWorker", "Resize", "DamageCheckpoint"),
        *("--spares", "0", "--out", str(tmp_path)),
    ]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    struck = {fault["kind"]: fault for fault in result["faults"]}
    assert struck.keys() == {"KillWorker", "Resize", "DamageCheckpoint"}
    assert result["findings"] == []
    assert struck["Resize"]["steps_lost"] == 0
    assert struck["DamageCheckpoint"]["steps_lost"] > 0  # the newest checkpoint was passed over
    assert "samples missing, 0 duplicated" in done.stdout
