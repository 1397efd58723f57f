"""Jobs on a real head: the entrypoints are trivial, the way there is the one of every job."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.head import Head, free_ports, running_head
from pliant.cluster.submit import (
    Client,
    Submission,
    connect,
    latest,
    logs,
    status,
    stop,
    submit,
    wait,
)
from pliant.errors import ClusterError

STOP_VARIABLES = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "60"}

SAVES_WHEN_INTERRUPTED = """\
import signal, sys, time

def save(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    time.sleep(4)
    print("checkpoint taken", flush=True)
    sys.exit(4)

signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with running_head() as running:
        yield running


@pytest.fixture
def client(head: Head, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return connect(head.dashboard)


def test_a_job_finds_its_files_and_is_followed_to_its_end(client: Client, tmp_path: Path) -> None:
    (tmp_path / "spec").write_text("what the user wrote")
    entrypoint = "sleep 1; cat spec.yaml; echo; echo value=$PLIANT__X; exit 3"
    job = Submission(
        "follow", entrypoint, {"spec.yaml": tmp_path / "spec"}, None, {"PLIANT__X": "7"}
    )
    submission_id = submit(client, job)
    printed = "".join(logs(client, "follow", follow=True))
    assert "what the user wrote\nvalue=7\n" in printed
    info = wait(client, submission_id, timeout_s=10)
    assert (info.name, info.status, info.exit_code) == ("follow", "FAILED", 3)
    assert info.start_time is not None
    assert info.end_time is not None
    assert info.start_time < info.end_time


def test_a_stopped_job_has_time_for_its_checkpoint(client: Client, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SAVES_WHEN_INTERRUPTED)
    job = Submission("saves", "exec python job.py", {}, tmp_path, STOP_VARIABLES)
    submit(client, job)
    lines = logs(client, "saves", follow=True)
    for chunk in lines:
        if "training" in chunk:
            break
    assert status(client, "saves").status == "RUNNING"
    started = time.monotonic()
    assert stop(client, "saves", wait_s=30).status == "STOPPED"
    assert time.monotonic() - started > 3
    # Ray's own wait of 3 s would have cut the last line off.
    assert "got SIGINT\ncheckpoint taken\n" in "".join(logs(client, "saves"))


def test_a_job_goes_on_under_its_name(client: Client) -> None:
    first = submit(client, Submission("again", "true"))
    assert wait(client, first, timeout_s=20).status == "SUCCEEDED"
    assert submit(client, Submission("again", "true")) == "again-2"
    newest = latest(client, "again")
    assert newest is not None
    assert newest.submission_id == "again-2"
    wait(client, "again", timeout_s=20)


def test_nobody_answers_at_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterError, match=f"No Ray cluster answers at {address}"):
        connect(address, environ={})


@pytest.mark.slow  # another head of its own
def test_a_cluster_with_tokens_takes_the_one_that_ray_would_find(tmp_path: Path) -> None:
    token = "a-token-for-this-test-alone-0123456789"
    (tmp_path / "token").write_text(token + "\n")
    with running_head(extra_env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}) as guarded:
        client = connect(guarded.dashboard, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")})
        submit(client, Submission("guarded", "sleep 1; echo let in"))
        assert "let in\n" in "".join(logs(client, "guarded", follow=True))
        with pytest.raises(ClusterError, match="wants a token"):
            connect(guarded.dashboard, {"RAY_AUTH_TOKEN": "another-one"})
