"""Whole jobs on an embedded Ray: killed, stopped, moved to another number of workers."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes.displays import RecordedDisplay
from fakes.jobs import TINY_LLAMA
from pliant.errors import CheckpointMismatch, ClusterError, DataError, UserError
from pliant.spec import JobSpec
from pliant.spec.load import build_spec, merge
from pliant.tracking import Journal
from pliant.tracking.events import replay
from pliant.training.conclusion import Outcome
from pliant.training.launch import run_job

STEPS = 12
pytestmark = pytest.mark.usefixtures("embedded_ray")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 short samples; their packs make several epochs of the run."""
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    lines = [
        {"prompt": f"{words[i % 6]} {i} ", "completion": " ".join(words[: 1 + i % 5]) * (1 + i % 3)}
        for i in range(120)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def spec_of(data: Path, name: str, changes: dict[str, Any] | None = None) -> JobSpec:
    tree: dict[str, Any] = {
        "name": name,
        "model": {"config": {**TINY_LLAMA, "vocab_size": "auto"}},
        "data": {
            "train": str(data),
            "split": {"validation": 0.1},
            "tokenizer": {"train_vocab_size": 300},
            "seq_len": 64,
            "window": 50,
            "block_steps": 2,
        },
        "training": {
            "global_batch_size": 5,
            "steps": STEPS,
            "lr": 1e-2,
            "digest_every": 4,
            "eval_every": 6,
        },
        "elastic": {"min_workers": 1, "max_workers": 2, "spares": 0},
        "checkpoint": {"every": 3, "keep": 2},
        "tracking": {"system_metrics_every_s": 3600},
        "resources": {"cpus_per_worker": 1},
    }
    return build_spec(merge(tree, changes or {}), origin="test")


def run(spec: JobSpec, runs_dir: Path, stop_at: int | None = None) -> tuple[Outcome, list[str]]:
    stop = threading.Event()

    def watch(step: int) -> None:
        if stop_at is not None and step >= stop_at:
            stop.set()

    display = RecordedDisplay(watch)
    return run_job(spec, runs_dir, display, stop), display.lines


def losses(outcome: Outcome) -> dict[int, float]:
    return replay(Journal(outcome.run_dir / "events.jsonl").events()).metric("loss")


@pytest.fixture(scope="module")
def undisturbed(data: Path, runs_dir: Path) -> Outcome:
    outcome, _ = run(spec_of(data, "undisturbed"), runs_dir)
    return outcome


def test_a_job_trains_evaluates_and_accounts_for_every_sample(undisturbed: Outcome) -> None:
    summary = json.loads((undisturbed.run_dir / "summary.json").read_text())
    assert summary["state"] == "FINISHED"
    assert summary["steps"] == STEPS
    assert summary["last_loss"] < summary["first_loss"] - 0.3
    assert summary["eval_loss"] < summary["first_loss"]
    assert summary["world_sizes"] == [2]
    assert (summary["restarts"], summary["steps_lost"]) == (0, 0)
    assert (summary["samples_missing"], summary["samples_duplicated"]) == (0, 0)
    assert 0.8 < summary["fill_ratio"] <= 1
    epochs = replay(Journal(undisturbed.run_dir / "events.jsonl").events()).metric("epoch")
    assert max(epochs.values()) >= 1  # the run crosses an epoch's end


def test_mlflow_holds_what_the_journal_holds(undisturbed: Outcome) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(undisturbed.mlflow_uri)
    run_id = undisturbed.summary.mlflow_run_id
    assert run_id is not None
    history = {point.step: point.value for point in client.get_metric_history(run_id, "loss")}
    assert history == pytest.approx(losses(undisturbed))
    record = client.get_run(run_id)
    assert record.info.status == "FINISHED"
    assert record.data.params["training.lr"] == "0.01"
    assert record.data.params["deepspeed.zero_stage"] == "1"
    artifacts = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert {
        "lengths.png",
        "loss.png",
        "manifest.json",
        "resolved.yaml",
        "summary.json",
    } <= artifacts


def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_nothing_else(
    undisturbed: Outcome, data: Path, runs_dir: Path
) -> None:
    drill = {
        "elastic": {"drills": [{"kind": "kill", "rank": 1, "step": 8}]},
        "checkpoint": {"hot_every": 0},  # without snapshots in memory
    }
    outcome, lines = run(spec_of(data, "killed", drill), runs_dir)
    summary = outcome.summary
    assert summary.state == "FINISHED"
    assert summary.restarts == 1
    assert summary.steps_lost == 2  # saved at 6, killed after 8
    assert (summary.samples_missing, summary.samples_duplicated) == (0, 0)
    assert losses(outcome) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert summary.eval_loss == pytest.approx(undisturbed.summary.eval_loss, rel=1e-6)
    assert any("the worker of rank 1 died" in line for line in lines)


def test_the_loss_does_not_depend_on_the_number_of_workers(
    undisturbed: Outcome, data: Path, runs_dir: Path
) -> None:
    # Three workers do not divide the five micro-batches of a step. One is tried further below.
    changes = {
        "elastic": {"min_workers": 3, "max_workers": 3},
        "deepspeed": {"zero_stage": 0},
    }
    outcome, _ = run(spec_of(data, "three-workers", changes), runs_dir)
    assert outcome.summary.world_sizes == (3,)
    assert losses(outcome) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert (outcome.summary.samples_missing, outcome.summary.samples_duplicated) == (0, 0)


def test_a_stopped_job_goes_on_on_other_workers_where_it_was(
    undisturbed: Outcome, data: Path, runs_dir: Path
) -> None:
    name = "stopped"
    outcome, _ = run(spec_of(data, name), runs_dir, stop_at=4)
    stopped_at = outcome.summary.steps
    assert outcome.summary.state == "INTERRUPTED"
    assert 4 <= stopped_at < STEPS
    left = outcome.run_dir / "ray" / f"{name}-1"  # by a driver that was killed
    left.mkdir(parents=True)
    (left / "checkpoint_manager_snapshot.json").write_text('{"torn')
    moved = {"elastic": {"max_workers": 1}, "deepspeed": {"zero_stage": 3}}
    outcome, lines = run(spec_of(data, name, moved), runs_dir)
    assert outcome.summary.state == "FINISHED"
    assert outcome.summary.steps_lost == 0
    assert outcome.summary.world_sizes == (2, 1)
    assert losses(outcome) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert (outcome.summary.samples_missing, outcome.summary.samples_duplicated) == (0, 0)
    assert any(f"training goes on from step {stopped_at} with 1 worker" in line for line in lines)
    # A job that is finished is not trained again.
    again, lines = run(spec_of(data, name, moved), runs_dir)
    assert again.summary == outcome.summary
    assert "is finished" in lines[-1]


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(
    undisturbed: Outcome, data: Path, runs_dir: Path
) -> None:
    wider = {"model": {"config": {"hidden_size": 48}}}
    before = {p: p.read_bytes() for p in undisturbed.run_dir.iterdir() if p.is_file()}
    for steps in (STEPS, STEPS + 1):  # finished, or to be gone on with
        changes = merge(wider, {"training": {"steps": steps}})
        with pytest.raises(CheckpointMismatch) as caught:
            run(spec_of(data, "undisturbed", changes), runs_dir)
        assert caught.value.exit_code == 2
        assert "model.config.hidden_size was 32 and is now 48" in caught.value.message
    # Nothing of the good run was touched.
    assert {p: p.read_bytes() for p in undisturbed.run_dir.iterdir() if p.is_file()} == before


def test_a_tracking_server_that_is_down_does_not_stop_training(
    data: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.training.conclusion.RUN_ID_DEADLINE_S", 1.0)
    monkeypatch.setattr("pliant.training.conclusion.TRACKING_DEADLINE_S", 1.0)
    down = {
        "tracking": {"mlflow_uri": "http://127.0.0.1:9"},
        "training": {"steps": 2},
        "elastic": {"max_workers": 1},
    }
    outcome, _ = run(spec_of(data, "untracked", down), runs_dir)
    assert outcome.summary.state == "FINISHED"
    assert outcome.summary.mlflow_run_id is None
    assert outcome.unsent_events > 2


BAD_INPUT = {
    "no such file": ({"data": {"train": "nowhere.jsonl"}}, DataError, "nowhere.jsonl"),
    "too few workers": (
        {"elastic": {"min_workers": 9, "max_workers": 9}},
        ClusterError,
        "room for 4 workers",
    ),
    "fp16 on a CPU": ({"training": {"precision": "fp16"}}, UserError, "fp16"),
    "own code": ({"training": {"loss": "no_such.loss"}}, UserError, "no_such"),
    "extra": ({"deepspeed": {"extra": {"train_batch_size": 3}}}, UserError, "train_batch_size"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_leaves_no_run_behind(
    case: str, data: Path, runs_dir: Path
) -> None:
    changes, kind, words = BAD_INPUT[case]
    with pytest.raises(kind, match=words) as caught:
        run(spec_of(data, "bad", changes), runs_dir)
    assert caught.value.exit_code == 2
    assert "Traceback" not in caught.value.message
    assert not (runs_dir / "bad").exists()


def test_own_model_loss_transform_and_callback_plug_in(data: Path, tmp_path: Path) -> None:
    own = {
        "model": {"config": None, "factory": "fakes.own_code.average_so_far"},
        "data": {"transform": "fakes.own_code.upper_case"},
        "training": {
            "loss": "fakes.own_code.doubled_nll",
            "callbacks": ["fakes.own_code.LowestLoss"],
            "steps": 2,
        },
        "elastic": {"max_workers": 1},
    }
    outcome, _ = run(spec_of(data, "own-code", own), tmp_path)
    assert outcome.summary.state == "FINISHED"
    assert outcome.summary.first_loss == pytest.approx(2 * math.log(300), rel=0.2)  # doubled
    (manifest,) = tmp_path.glob("stores/*/manifest.json")
    accounting = json.loads(manifest.read_text())["accounting"]
    filtered = sum(counts["filtered"] for counts in accounting.values())
    assert filtered == sum("7" in str(i) for i in range(120))


def test_own_code_that_fails_is_retried_within_the_budget_and_reported(
    data: Path, runs_dir: Path
) -> None:
    failing = {
        "training": {"callbacks": ["fakes.failing.FailAtStepTwo"]},
        "elastic": {"max_workers": 1, "max_restarts": 1},
    }
    outcome, _ = run(spec_of(data, "failing", failing), runs_dir)
    assert outcome.summary.state == "FAILED"
    assert outcome.summary.restarts == 1
    assert outcome.error is not None
    assert outcome.error.exit_code == 3
    assert "no luck at step 2" in outcome.error.message
    assert "failing.py" in (outcome.run_dir / "error.txt").read_text()  # the traceback
    assert (outcome.summary.samples_missing, outcome.summary.samples_duplicated) == (0, 0)


def test_a_line_that_is_not_json_is_named(tmp_path: Path, runs_dir: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl line 2"):
        run(spec_of(bad, "bad"), runs_dir)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="empty"):
        run(spec_of(empty, "bad"), runs_dir)
    assert not (runs_dir / "bad").exists()
