"""A real MLflow in every test: an SQLite store, or a server in a process of its own."""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from pliant.errors import UserError
from pliant.tracking import Journal, MlflowTracker, sync

MakeTracker = Callable[..., MlflowTracker]
DEADLINE_S = 30.0


def step(number: int, loss: float, at: float | None = None) -> dict[str, Any]:
    return {
        "kind": "step",
        "time": 1000.0 + number if at is None else at,
        "step": number,
        "metrics": {"loss": loss},
    }


def history(uri: str, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """(step, value) in the order of their times."""
    assert run_id is not None
    return [(m.step, m.value) for m in MlflowClient(uri).get_metric_history(run_id, name)]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_history_is_what_was_journalled(make_tracker: MakeTracker, uri: str) -> None:
    tracker = make_tracker()
    tracker.start()
    for number in range(1, 2501):
        tracker.journal.append(step(number, 1 / number))
    assert tracker.finish("FINISHED", DEADLINE_S) == 0
    expected = [(number, 1 / number) for number in range(1, 2501)]
    assert history(uri, tracker.run_id, "loss") == expected
    run = MlflowClient(uri).get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "bee")
    assert run.data.params == {"training.lr": "0.0001"}
    assert run.data.tags["mlflow.source.name"] == "pliant"
    assert run.data.tags["pliant.version"] == "0.1.0"
    assert run.data.tags["team"] == "apiary"


def test_events_arrive_while_the_job_runs(make_tracker: MakeTracker, uri: str) -> None:
    tracker = make_tracker()
    tracker.start()
    tracker.journal.append(step(1, 3.0))
    wait_until(lambda: tracker.run_id is not None and tracker.unsent() == 1)
    assert history(uri, tracker.run_id, "loss") == [(1, 3.0)]
    assert MlflowClient(uri).get_run(tracker.run_id).info.status == "RUNNING"
    assert tracker.finish("KILLED", DEADLINE_S) == 0


def test_one_run_over_drivers_and_no_step_twice(make_tracker: MakeTracker, uri: str) -> None:
    first = make_tracker()
    first.start()
    for number in range(1, 11):
        first.journal.append(step(number, 10.0 - number))
    assert first.finish("FAILED", DEADLINE_S) == 0
    second = make_tracker()
    second.start()
    assert second.run_id == first.run_id
    for number in range(6, 16):
        second.journal.append(step(number, 20.0 - number, at=2000.0 + number))
    second.journal.append({"kind": "evaluation", "step": 10, "metrics": {"eval_loss": 4.0}})
    wait_until(lambda: second.unsent() == 1)
    assert MlflowClient(uri).get_run(second.run_id).info.status == "RUNNING"
    assert second.finish("FINISHED", DEADLINE_S) == 0
    kept = [(n, 10.0 - n) for n in range(1, 11)] + [(n, 20.0 - n) for n in range(11, 16)]
    assert history(uri, second.run_id, "loss") == kept
    assert history(uri, second.run_id, "eval_loss") == [(10, 4.0)]
    assert len(MlflowClient(uri).search_runs(["1"])) == 1
    assert MlflowClient(uri).get_run(second.run_id).info.status == "FINISHED"


def test_redone_steps_within_one_driver_are_not_sent_again(
    make_tracker: MakeTracker, uri: str
) -> None:
    tracker = make_tracker()
    tracker.start()
    for number in [1, 2, 3, 2, 3, 4]:
        tracker.journal.append(step(number, float(number), at=time.time()))
    assert tracker.finish("FINISHED", DEADLINE_S) == 0
    assert history(uri, tracker.run_id, "loss") == [(n, float(n)) for n in range(1, 5)]


def test_a_kill_between_sending_and_saving_repeats_nothing(
    make_tracker: MakeTracker, uri: str, run_dir: Path
) -> None:
    first = make_tracker()
    first.start()
    wait_until(lambda: first.run_id is not None)
    before = (run_dir / "mlflow.json").read_bytes()
    for number in range(1, 6):
        first.journal.append(step(number, float(number)))
        sampled = {"kind": "system", "time": 1000.5 + number, "step": number}
        first.journal.append({**sampled, "metrics": {"system/cpu": 50.0 + number}})
    assert first.finish("FAILED", DEADLINE_S) == 0
    (run_dir / "mlflow.json").write_bytes(before)
    # The redone step has another time, so MLflow's own key would not hold it back.
    first.journal.append(step(5, 5.5, at=3000.0))
    first.journal.append(step(6, 6.0, at=3001.0))
    second = make_tracker()
    second.start()
    assert second.finish("FINISHED", DEADLINE_S) == 0
    assert second.run_id == first.run_id
    assert history(uri, second.run_id, "loss") == [(n, float(n)) for n in range(1, 7)]
    assert history(uri, second.run_id, "system/cpu") == [(n, 50.0 + n) for n in range(1, 6)]


def test_a_run_created_just_before_a_kill_is_found_again(
    make_tracker: MakeTracker, uri: str, run_dir: Path
) -> None:
    first = make_tracker()
    first.start()
    assert first.finish("KILLED", DEADLINE_S) == 0
    state = json.loads((run_dir / "mlflow.json").read_text())
    (run_dir / "mlflow.json").write_text(json.dumps({**state, "run_id": None}))
    second = make_tracker()
    second.start()
    assert second.finish("FINISHED", DEADLINE_S) == 0
    assert second.run_id == first.run_id


def test_events_of_the_machine_are_kept_through_a_redo(make_tracker: MakeTracker, uri: str) -> None:
    tracker = make_tracker()
    tracker.start()
    for at, number in [(1.0, 8), (2.0, 8), (3.0, 5), (4.0, 9)]:
        metrics = {"system/cpu": at}
        tracker.journal.append({"kind": "system", "time": at, "step": number, "metrics": metrics})
    assert tracker.finish("FINISHED", DEADLINE_S) == 0
    sent = history(uri, tracker.run_id, "system/cpu")
    assert sent == [(8, 1.0), (8, 2.0), (8, 3.0), (9, 4.0)]


def test_numbers_that_are_not_finite_and_odd_names_do_not_stop_the_rest(
    make_tracker: MakeTracker, uri: str
) -> None:
    tracker = make_tracker()
    tracker.start()
    metrics = {"loss": float("nan"), "a=b": 1.0, "text": "no number", "grad_norm": float("inf")}
    tracker.journal.append({"kind": "step", "step": 1, "metrics": metrics})
    tracker.journal.append({"kind": "step", "step": 2, "time": -1.0, "metrics": {"loss": 8.0}})
    tracker.journal.append({"kind": "step", "step": 3, "metrics": {"loss": 2.0}})
    assert tracker.finish("FINISHED", DEADLINE_S) == 0
    loss = dict(history(uri, tracker.run_id, "loss"))
    assert loss.keys() == {1, 3}, "MLflow rejects a negative time"
    assert loss[3] == 2.0
    assert history(uri, tracker.run_id, "a_b") == [(1, 1.0)]


def test_changed_parameters_are_tags_and_long_ones_are_shortened(
    make_tracker: MakeTracker, uri: str
) -> None:
    many = {f"p{n}": n for n in range(250)}
    first = make_tracker(params={"lr": 1.0, "prompt": "é" * 9000, **many})
    first.start()
    assert first.finish("KILLED", DEADLINE_S) == 0
    second = make_tracker(params={"lr": 2.0, "more": "x", **many})
    second.start()
    assert second.finish("FINISHED", DEADLINE_S) == 0
    data = MlflowClient(uri).get_run(second.run_id).data
    assert len(data.params) == 253
    assert data.params["lr"] == "1.0"
    assert data.tags["pliant.changed.lr"] == "2.0"
    assert data.params["more"] == "x"
    assert data.params["prompt"].endswith("... (9000 characters)")
    assert [tag for tag in data.tags if tag.startswith("pliant.changed")] == ["pliant.changed.lr"]


def test_artifacts_are_stored_beside_the_database(
    make_tracker: MakeTracker, uri: str, run_dir: Path, tmp_path: Path
) -> None:
    tracker = make_tracker()
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text("{}")
    tracker.artifact(run_dir / "summary.json")
    tracker.artifact(run_dir / "never.txt", "missing")
    tracker.artifact(tmp_path / "mlflow.db", "outside")
    tracker.start()
    assert tracker.finish("FINISHED", DEADLINE_S) == 0
    stored = tmp_path / "mlartifacts" / str(tracker.run_id) / "artifacts"
    files = {str(path.relative_to(stored)) for path in stored.rglob("*") if path.is_file()}
    assert files == {"summary.json", "outside/mlflow.db"}
    assert next(Journal(run_dir / "events.jsonl").events())["path"] == "summary.json"


def test_a_run_deleted_on_the_server_is_recorded_anew(make_tracker: MakeTracker, uri: str) -> None:
    first = make_tracker()
    first.start()
    first.journal.append(step(1, 1.0))
    wait_until(lambda: first.run_id is not None and first.unsent() == 1)
    deleted = first.run_id
    MlflowClient(uri).delete_run(deleted)
    first.journal.append(step(2, 2.0))
    assert first.finish("FINISHED", DEADLINE_S) == 0
    assert first.run_id != deleted
    assert history(uri, first.run_id, "loss") == [(1, 1.0), (2, 2.0)]


def test_another_store_gets_the_whole_journal(
    make_tracker: MakeTracker, uri: str, empty_store: Path, tmp_path: Path
) -> None:
    first = make_tracker()
    first.start()
    first.journal.append(step(1, 1.0))
    assert first.finish("KILLED", DEADLINE_S) == 0
    shutil.copy(empty_store, tmp_path / "other.db")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    second = make_tracker(uri=other)
    second.start()
    assert second.finish("FINISHED", DEADLINE_S) == 0
    assert history(other, second.run_id, "loss") == [(1, 1.0)]


def test_a_second_sender_waits_for_the_first(make_tracker: MakeTracker, uri: str) -> None:
    first = make_tracker()
    first.start()
    first.journal.append(step(1, 1.0))
    wait_until(lambda: first.run_id is not None and first.unsent() == 1)
    wait_until(lambda: history(uri, first.run_id, "loss") == [(1, 1.0)])
    second = make_tracker(journal=first.journal)
    second.start()
    assert second.finish("FAILED", 0.5) == 1
    first.journal.append(step(2, 2.0))
    assert first.finish("FINISHED", DEADLINE_S) == 0
    assert history(uri, first.run_id, "loss") == [(1, 1.0), (2, 2.0)]
    assert MlflowClient(uri).get_run(first.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_nothing_is_lost_while_the_server_is_down(
    make_tracker: MakeTracker, server: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Down at the start, killed in between, and gone at the end: `sync` sends the rest."""
    caplog.set_level(logging.INFO, "pliant.tracking")
    tracker = make_tracker(uri=server.uri)
    tracker.start()
    waits = [_append_timed(tracker.journal, step(number, float(number))) for number in range(100)]
    wait_until(lambda: "Events are kept" in caplog.text)
    server.start()
    wait_until(lambda: tracker.run_id is not None and tracker.unsent() == 1)
    server.stop()
    for number in range(100, 200):
        waits.append(_append_timed(tracker.journal, step(number, float(number))))
    (run_dir / "summary.json").write_text("{}")
    tracker.artifact(run_dir / "summary.json")
    started = time.monotonic()
    assert tracker.finish("FINISHED", 1.5) == 102
    assert time.monotonic() - started < 3
    assert max(waits) < 0.25, "callers never wait"
    server.start()
    assert sync(run_dir, DEADLINE_S) == 0
    client = MlflowClient(server.uri)
    expected = [(number, float(number)) for number in range(200)]
    assert history(server.uri, tracker.run_id, "loss") == expected
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["summary.json"]
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert sync(run_dir) == 0
    warned = [r for r in caplog.records if "Events are kept" in r.message and r.levelno > 20]
    back = [r for r in caplog.records if "is back" in r.message]
    assert (len(warned), len(back)) == (2, 1)


def _append_timed(journal: Journal, event: dict[str, Any]) -> float:
    started = time.monotonic()
    journal.append(event)
    return time.monotonic() - started


def test_sync_ends_the_run_of_a_driver_that_was_killed(
    make_tracker: MakeTracker, uri: str, run_dir: Path
) -> None:
    tracker = make_tracker(uri="http://127.0.0.1:9")
    tracker.start()
    tracker.journal.append(step(1, 1.0))
    assert tracker.finish("FINISHED", 0.3) == 2
    state = json.loads((run_dir / "mlflow.json").read_text())
    killed = {**state, "uri": uri, "status": None}
    (run_dir / "mlflow.json").write_text(json.dumps(killed))
    assert sync(run_dir) == 0
    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    assert history(uri, run_id, "loss") == [(1, 1.0)]
    assert MlflowClient(uri).get_run(run_id).info.status == "KILLED"


def test_sync_of_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no mlflow\.json"):
        sync(tmp_path)


def test_a_damaged_state_is_an_error_of_the_user(make_tracker: MakeTracker, run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "mlflow.json").write_text('{"uri": ')
    with pytest.raises(UserError, match="Remove it"):
        make_tracker().start()


def test_two_processes_may_create_the_same_store_at_once(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from pliant.tracking import MlflowTracker
root, name = Path(sys.argv[1]), sys.argv[2]
tracker = MlflowTracker(f"sqlite:///{root}/mlflow.db", "pliant", name, root / name, {}, {})
tracker.start()
tracker.journal.append({"kind": "step", "step": 1, "metrics": {"loss": 1.0}})
raise SystemExit(tracker.finish("FINISHED", 60))
"""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), name],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    said = [job.communicate()[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert said == ["", ""], "MLflow is quiet, and nobody had to retry"
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [e for e in client.search_experiments() if e.name == "pliant"]
    assert len(experiments) == 1
    assert experiments[0].artifact_location == (tmp_path / "mlartifacts").as_uri()
    runs = client.search_runs([experiments[0].experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["a", "b"]
    assert all(run.data.metrics == {"loss": 1.0} for run in runs)


def test_what_another_client_logged_is_taken_into_account(
    make_tracker: MakeTracker, uri: str
) -> None:
    tracker = make_tracker()
    tracker.start()
    assert tracker.finish("KILLED", DEADLINE_S) == 0
    MlflowClient(uri).log_batch(tracker.run_id, metrics=[Metric("loss", 1.0, 1, 3)])
    again = make_tracker()
    again.start()
    again.journal.append(step(3, 9.0))
    again.journal.append(step(4, 2.0))
    assert again.finish("FINISHED", DEADLINE_S) == 0
    assert history(uri, again.run_id, "loss") == [(3, 1.0), (4, 2.0)]
