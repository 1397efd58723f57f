"""`pliant` as a process, and as a job on a real cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fakes.jobs import TINY_LLAMA

ROOT = Path(__file__).parents[2]


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"line number {i} " * 3}) + "\n" for i in range(99))
    )
    tree = {
        "name": "command",
        "model": {"config": {**TINY_LLAMA, "vocab_size": "auto"}},
        "data": {"train": str(data), "tokenizer": {"train_vocab_size": 300}, "seq_len": 64},
        "training": {"global_batch_size": 4, "steps": 100_000, "schedule": "constant"},
        "checkpoint": {"every": 1000},
        "env": {"PLIANT_TEST_SETTING": "7", "HF_TOKEN": "hunter2"},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def pliant(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pliant", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        process_group=0,
    )


def wait_for_step(run_dir: Path, step: int, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    journal = run_dir / "events.jsonl"
    while time.monotonic() < end:
        if journal.is_file() and f'"step": {step},' in journal.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_next_start_goes_on(
    number: signal.Signals, spec_path: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    process = pliant("run", spec_path, "--runs-dir", runs)
    wait_for_step(runs / "command", 5)
    os.killpg(process.pid, number)  # as a terminal or `timeout` does
    out, err = process.communicate(timeout=90)
    assert process.returncode == 4, out + err
    assert "Traceback" not in out + err
    summary = json.loads((runs / "command" / "summary.json").read_text())
    assert summary["state"] == "INTERRUPTED"
    assert (summary["samples_missing"], summary["samples_duplicated"]) == (0, 0)
    if number == signal.SIGTERM:
        return
    stopped_at = summary["steps"]
    steps = f"training.steps={stopped_at + 2}"
    process = pliant("run", spec_path, "--runs-dir", runs, "--set", steps, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert (summary["state"], summary["steps"]) == ("FINISHED", stopped_at + 2)
    assert (summary["steps_lost"], summary["restarts"]) == (0, 0)
    assert "PLIANT_TEST_SETTING=7" in err
    manifest = json.loads((runs / "command" / "manifest.json").read_text())
    assert manifest["resolved"]["env"]["PLIANT_TEST_SETTING"] == "7"
    written = [path for path in runs.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []
    assert "hunter2" not in out + err


def test_a_trial_run_evaluates_saves_and_resumes(spec_path: Path, tmp_path: Path) -> None:
    process = pliant("run", spec_path, "--smoke", "--json", "--runs-dir", tmp_path / "runs")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert (summary["state"], summary["steps"]) == ("FINISHED", 2)
    assert summary["eval_loss"] is not None
    assert "training goes on from step 1" in err


BAD_COMMANDS = {
    "no file": (["run", "nothing.yaml"], "There is no file nothing.yaml"),
    "unknown key": (["check", "{spec}", "--set", "training.lrr=1"], "Did you mean training.lr?"),
    "bad setting": (["check", "{spec}", "--set", "training.lr"], "KEY=VALUE"),
    "unknown option": (["run", "{spec}", "--fast"], "--fast"),
    "no such data": (["check", "{spec}", "--set", "data.train=gone.jsonl"], "gone.jsonl"),
    "unreachable": (["run", "{spec}", "--address", "127.0.0.1:9"], "127.0.0.1:9"),
    "runs-dir is a file": (["run", "{spec}", "--runs-dir", "{spec}"], "Not a directory"),
    "absurd row": (["check", "{spec}", "--set", "data.seq_len=1000000000000"], "seq_len"),
    "unknown model": (
        ["check", "{spec}", "--set", "model.config.model_type=lama"],
        "Did you mean llama",
    ),
    "bad name": (["check", "{spec}", "--set", "name=../evil"], "must name a folder"),
    "no run": (["sync", "nobody"], "nobody"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_bad_input_is_one_sentence_with_exit_code_2(case: str, spec_path: Path) -> None:
    arguments, words = BAD_COMMANDS[case]
    process = pliant(*[argument.format(spec=spec_path) for argument in arguments])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert words in err
    assert "Traceback" not in out + err
    assert not (Path.cwd() / "runs" / "command").exists()


def test_a_checked_spec_is_resolved_and_prints_as_yaml(spec_path: Path) -> None:
    process = pliant("check", spec_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    spec = yaml.safe_load(out)
    assert spec["resources"]["device"] in ("cpu", "cuda")
    assert spec["training"]["accelerator"]["enable_metadata_cache"] is False
    assert "decided when the job starts: " in out


def test_ray_job_submit_runs_the_entry_point_on_a_real_cluster(tmp_path: Path) -> None:
    from fakes.head import running_head

    runs = tmp_path / "runs"
    settings = ["training.steps=3", "training.eval_every=null", "elastic.drills=[]"]
    with running_head(num_cpus=4) as head:
        command = [
            *[str(Path(sys.executable).parent / "ray"), "job", "submit"],
            *["--address", head.dashboard, "--working-dir", str(ROOT), "--"],
            *["python", "jobs/train.py", "jobs/specs/demo.yaml", "--runs-dir", str(runs)],
            *[part for setting in settings for part in ("--set", setting)],
        ]
        job = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        )
        assert job.returncode == 0, job.stdout + job.stderr
    summary = json.loads((runs / "demo" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("FINISHED", 3)
    assert summary["world_sizes"] == [2]
