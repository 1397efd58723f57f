from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pliant.cluster.submit import (
    NAME_KEY,
    JobInfo,
    Submission,
    check_runs_dir,
    connect,
    latest,
    list_jobs,
    logs,
    newest,
    next_id,
    plan,
    status,
    stop,
    submit,
    working_directory,
)
from pliant.errors import ClusterError, SpecError, UserError

SPEC = """\
name: demo
model:
  config: {model_type: llama}
data:
  train: train.jsonl
  tokenizer: {train_vocab_size: 512}
  seq_len: 64
training:
  steps: 4
  global_batch_size: 4
  micro_batch_size: 1
"""


class FakeClient:
    """A cluster that remembers what it was sent; a stopped job ends at the second look."""

    def __init__(self, *jobs: SimpleNamespace) -> None:
        self.jobs = list(jobs)
        self.uploaded: dict[str, str] = {}
        self.sent: dict[str, Any] = {}

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> str:
        directory = Path(runtime_env["working_dir"])
        self.uploaded = {f.name: f.read_text() for f in directory.iterdir() if f.is_file()}
        self.sent = {"entrypoint": entrypoint, "runtime_env": runtime_env, "metadata": metadata}
        self.jobs.append(job(submission_id, metadata[NAME_KEY], "PENDING", len(self.jobs)))
        return submission_id

    def list_jobs(self) -> list[SimpleNamespace]:
        listing = [SimpleNamespace(**vars(each)) for each in self.jobs]
        for each in self.jobs:
            if each.status == "STOPPING":
                each.status = "STOPPED"
        return listing

    def get_job_logs(self, job_id: str) -> str:
        return f"all of {job_id}"

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for line in ("step 1\n", "step 2\n"):
            yield line
        raise RuntimeError("WebSocket connection closed unexpectedly")

    def stop_job(self, job_id: str) -> bool:
        for each in self.jobs:
            if each.submission_id == job_id:
                each.status = "STOPPING"
        return True


def job(submission_id: str, name: str | None, status: str, started: int) -> SimpleNamespace:
    return SimpleNamespace(
        submission_id=submission_id,
        metadata={NAME_KEY: name} if name else None,
        status=status,
        message=None,
        start_time=1000 * (started + 1),
        end_time=None,
        driver_exit_code=None,
    )


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "my job.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.parametrize("good", ["/mnt/runs", "/runs"])
def test_runs_dir_may_be_absolute_or_a_uri(good: str) -> None:
    check_runs_dir(good)


@pytest.mark.parametrize(
    "bad", ["runs", "./runs", "~/runs", "", "s3://bucket/runs", "file:///mnt/runs"]
)
def test_a_runs_dir_that_vanishes_with_the_job_is_refused(bad: str) -> None:
    with pytest.raises(UserError, match="file system that all nodes share"):
        check_runs_dir(bad)


def test_the_entrypoint_names_files_of_the_working_directory(spec: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "long.yaml"
    overlay.write_text("training: {steps: 9}\n")
    settings = ["training.lr=1e-4", "tracking.tags={a: b c}"]
    planned = plan(spec, "/mnt/runs", [overlay], settings, environ={})
    assert planned.entrypoint == (
        "exec python -m pliant run spec.yaml --overlay overlay-1.yaml --set training.lr=1e-4 "
        "--set 'tracking.tags={a: b c}' --runs-dir /mnt/runs --address auto"
    )
    with working_directory(planned) as directory:
        assert (directory / "spec.yaml").read_text() == SPEC
        assert (directory / "overlay-1.yaml").read_text() == overlay.read_text()
    assert not directory.exists()


def test_the_job_is_named_by_what_is_laid_over_the_spec(spec: Path) -> None:
    planned = plan(spec, "/mnt/runs", environ={"PLIANT__NAME": "second", "OTHER": "x"})
    assert planned.name == "second"
    assert planned.env_vars["PLIANT__NAME"] == "second"
    assert "OTHER" not in planned.env_vars


def test_a_job_is_stopped_by_the_signal_that_takes_a_checkpoint(spec: Path) -> None:
    planned = plan(spec, "/mnt/runs", environ={}, stop_wait_s=90)
    assert planned.env_vars == {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "90"}


def test_a_faulty_spec_never_reaches_the_cluster(spec: Path) -> None:
    with pytest.raises(SpecError, match="trainnig"):
        plan(spec, "/mnt/runs", settings=["trainnig.lr=1"], environ={})


def test_a_working_directory_travels_as_it_is(spec: Path, tmp_path: Path) -> None:
    planned = plan(spec, "/mnt/runs", working_dir=tmp_path, environ={})
    assert "run 'my job.yaml' " in planned.entrypoint
    with working_directory(planned) as directory:
        assert directory == tmp_path
    assert spec.exists()


def test_a_spec_outside_the_working_directory_is_refused(spec: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="not inside the working directory"):
        plan(spec, "/mnt/runs", working_dir=other, environ={})
    with pytest.raises(UserError, match="is not a directory"):
        plan(spec, "/mnt/runs", working_dir=tmp_path / "none", environ={})


def test_a_submission_carries_its_files_and_its_name(spec: Path) -> None:
    client = FakeClient()
    assert submit(client, plan(spec, "/mnt/runs", environ={})) == "demo-1"
    assert client.uploaded == {"spec.yaml": SPEC}
    assert client.sent["metadata"] == {NAME_KEY: "demo"}
    assert client.sent["runtime_env"]["env_vars"]["RAY_JOB_STOP_SIGNAL"] == "SIGINT"


def test_a_job_is_submitted_again_under_its_name() -> None:
    client = FakeClient(
        job("demo-1", "demo", "FAILED", 0), job("demo-big-7", "demo-big", "FAILED", 1)
    )
    assert submit(client, Submission("demo", "true")) == "demo-2"


def test_a_job_that_runs_is_not_submitted_twice() -> None:
    client = FakeClient(job("demo-1", "demo", "RUNNING", 0))
    with pytest.raises(UserError, match="RUNNING already, as demo-1") as caught:
        submit(client, Submission("demo", "true"))
    assert caught.value.submission_id == "demo-1"


def test_numbers_of_other_names_do_not_count() -> None:
    taken = ["a-1", "a-10", "a-b-99", "a.b-50", "a", "a-x"]
    assert next_id("a", taken) == "a-11"
    assert next_id("a.b", taken) == "a.b-51"
    assert next_id("axb", taken) == "axb-1"


def test_the_newest_submission_is_the_last_started() -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    jobs = [
        JobInfo("a-2", "a", "RUNNING", start_time=start + timedelta(hours=1)),
        JobInfo("a-1", "a", "FAILED", start_time=start),
        JobInfo("b-1", "b", "RUNNING", start_time=start + timedelta(hours=2)),
    ]
    assert newest(jobs, "a") == jobs[0]
    assert newest(jobs, "c") is None


def test_submissions_of_one_moment_are_told_apart_by_number() -> None:
    jobs = [JobInfo(f"a-{n}", "a", "FAILED") for n in (9, 10, 2)]
    found = newest(jobs, "a")
    assert found is not None
    assert found.submission_id == "a-10"


def test_a_job_is_found_by_name_or_by_id() -> None:
    client = FakeClient(job("demo-1", "demo", "FAILED", 0), job("demo-2", "demo", "RUNNING", 1))
    assert status(client, "demo").submission_id == "demo-2"
    assert status(client, "demo-1").status == "FAILED"
    assert latest(client, "other") is None


def test_jobs_that_pliant_did_not_submit_go_by_their_id() -> None:
    driver = SimpleNamespace(submission_id=None)
    client = FakeClient(job("raysubmit_x", None, "RUNNING", 0))
    client.jobs.insert(0, driver)
    driver.status = "RUNNING"
    assert [each.name for each in list_jobs(client)] == ["raysubmit_x"]


def test_an_unknown_job_is_answered_with_the_known_ones() -> None:
    client = FakeClient(job("b-1", "b", "FAILED", 0), job("a-1", "a", "FAILED", 1))
    with pytest.raises(ClusterError, match=r"no job c\. Known: a, b\."):
        status(client, "c")
    with pytest.raises(ClusterError, match="No job was submitted"):
        status(FakeClient(), "c")


def test_logs_are_whole_or_followed() -> None:
    client = FakeClient(job("demo-1", "demo", "RUNNING", 0))
    assert list(logs(client, "demo")) == ["all of demo-1"]
    followed = logs(client, "demo", follow=True)
    assert [next(followed), next(followed)] == ["step 1\n", "step 2\n"]
    with pytest.raises(ClusterError, match="closed unexpectedly"):
        next(followed)


def test_stopping_waits_for_the_end() -> None:
    client = FakeClient(job("demo-1", "demo", "RUNNING", 0))
    assert stop(client, "demo", wait_s=5).status == "STOPPED"


def test_stopping_without_waiting_says_that_the_job_goes_on() -> None:
    client = FakeClient(job("demo-1", "demo", "RUNNING", 0))
    assert not stop(client, "demo", wait_s=0).ended


def test_a_job_that_ended_is_left_alone() -> None:
    client = FakeClient(job("demo-1", "demo", "SUCCEEDED", 0))
    assert stop(client, "demo").status == "SUCCEEDED"


def test_an_address_where_nobody_takes_jobs_is_refused() -> None:
    with pytest.raises(ClusterError, match="http://HEAD:8265"):
        connect("head:6379", environ={})


def test_a_variable_that_would_win_over_the_address_is_refused() -> None:
    with pytest.raises(ClusterError, match="Unset RAY_ADDRESS"):
        connect("http://a:8265", environ={"RAY_ADDRESS": "http://b:8265"})
