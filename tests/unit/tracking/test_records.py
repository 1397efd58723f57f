import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pliant.tracking import environment_manifest
from pliant.tracking.metrics import METRICS, page
from pliant.tracking.system_metrics import sample

ROOT = Path(__file__).parents[3]


def test_the_page_of_metrics_is_the_table() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == page(), "run: python -m pliant.tracking.metrics docs/metrics.md"


def test_metrics_have_different_names() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_sample_has_the_metrics_of_the_table() -> None:
    first, second = sample(), sample()
    listed = {metric.name for metric in METRICS if metric.name.startswith("system/")}
    found = {name for name in first if "/gpu_" not in name}
    assert found == {name for name in listed if "/gpu_" not in name}
    assert first.keys() == second.keys()
    assert 0 < second["system/system_memory_usage_percentage"] < 100


def test_the_manifest_names_secrets_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    env = {"HF_TOKEN": "hf_x", "AWS_SECRET_ACCESS_KEY": "s", "MODE": "fast"}
    manifest = environment_manifest(env)
    text = json.dumps(manifest)
    assert "hf_x" not in text
    assert manifest["env"]["HF_TOKEN"] == "(not recorded)"
    assert manifest["env"]["MODE"] == "fast"
    assert manifest["env"]["NCCL_DEBUG"] == "INFO"
    assert manifest["packages"]["mlflow"] == "3.17.2"
    assert manifest["hardware"]["cores"] > 0


def test_the_manifest_says_which_commit_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment_manifest({})["git"] is None
    identity = ["-c", "user.name=bee", "-c", "user.email=bee@example.org"]
    (tmp_path / "code.py").write_text("1")
    for command in (["init"], ["add", "."], [*identity, "commit", "-m", "first"]):
        subprocess.run(["git", *command], check=True, capture_output=True)
    clean = environment_manifest({})["git"]
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "code.py").write_text("2")
    assert environment_manifest({})["git"] == {"commit": clean["commit"], "dirty": True}


def test_the_manifest_is_quick_and_survives_a_bare_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    started = time.monotonic()
    manifest = environment_manifest({})
    assert time.monotonic() - started < 1
    assert (manifest["git"], manifest["hardware"]["gpus"]) == (None, [])


def test_importing_the_package_imports_neither_mlflow_nor_matplotlib_nor_ray() -> None:
    heavy = "{'mlflow', 'matplotlib', 'ray', 'torch'}"
    program = f"import sys, pliant.tracking; raise SystemExit({heavy} & set(sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True)
