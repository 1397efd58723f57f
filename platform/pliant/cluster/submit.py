"""Jobs on a running cluster, through Ray's Jobs API: plan a submission, send it, watch it, stop it.

`plan` decides on the client what will be sent; `submit` sends it. A job is found again by its name
or by its submission id, which is the name and a number, so one name can be submitted many times.

Tokens: with RAY_AUTH_MODE=token or =disabled Ray's client does as told. Where the variable is not
set, a token that Ray would find (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token) is sent
along: a cluster with token authentication wants it, one without ignores it.
"""

import asyncio
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pliant.errors import ClusterError, UserError
from pliant.spec.load import ENV_PREFIX, load_spec

NAME_KEY = "pliant.name"
"""The key of a job's name in Ray's metadata."""

STOP_WAIT_S = 600
"""Seconds that a job has for its last checkpoint before Ray kills it; Ray's own default is 3."""

ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})


class Client(Protocol):
    """The part of `ray.job_submission.JobSubmissionClient` that is used here."""

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> str: ...

    def list_jobs(self) -> Sequence[Any]: ...

    def get_job_logs(self, job_id: str) -> str: ...

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...

    def stop_job(self, job_id: str) -> bool: ...


@dataclass(frozen=True)
class Submission:
    """A job as it will be sent."""

    name: str
    entrypoint: str
    """A shell command, run on the head node in the unpacked working directory."""
    files: dict[str, Path] = field(default_factory=dict)
    """What the working directory holds: the name there -> the file here."""
    working_dir: Path | None = None
    """A directory of the user's, uploaded as it is in place of `files`."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Of the job's driver and, through Ray, of its workers."""


@dataclass(frozen=True)
class JobInfo:
    """One submission as the cluster knows it."""

    submission_id: str
    name: str
    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    message: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None
    exit_code: int | None = None
    """Of the entrypoint, where it ended by itself; Ray keeps none for a stopped job."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def plan(
    spec_path: str | Path,
    runs_dir: str,
    overlays: Iterable[str | Path] = (),
    settings: Iterable[str] = (),
    working_dir: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    stop_wait_s: int = STOP_WAIT_S,
) -> Submission:
    """What to send for a job spec; the spec is checked here, before anything is sent.

    Without `working_dir` the job finds the spec and its overlays and nothing else. With it that
    directory travels instead, and must hold them; Ray leaves out what its .gitignore names and
    takes 512 MiB at most. Raises `SpecError` for a faulty spec, `UserError` for a wrong path.
    """
    spec_path, layers, settings = Path(spec_path), [Path(o) for o in overlays], list(settings)
    check_runs_dir(runs_dir)
    spec = load_spec(spec_path, layers, environ, settings)
    if working_dir is None:
        names = [f"spec{spec_path.suffix}"]
        names += [f"overlay-{i}{layer.suffix}" for i, layer in enumerate(layers, start=1)]
        files = dict(zip(names, [spec_path, *layers], strict=True))
    else:
        working_dir, files = Path(working_dir), {}
        names = [_inside(working_dir, path) for path in (spec_path, *layers)]
    return Submission(
        name=spec.name,
        entrypoint=_command(names, runs_dir, settings),
        files=files,
        working_dir=working_dir,
        env_vars=_spec_variables(environ) | _stop_variables(stop_wait_s),
    )


def check_runs_dir(runs_dir: str) -> None:
    """Raises `UserError` unless `runs_dir` can mean the same place on every machine."""
    if os.path.isabs(runs_dir):
        return
    raise UserError(
        f"--runs-dir is {runs_dir!r}, but a submitted job runs in an unpacked package that "
        "vanishes when it ends, and keeps its runs on a file system that all nodes share. Use an "
        "absolute path there, such as /mnt/runs.",
        runs_dir=runs_dir,
    )


def connect(address: str = "auto", environ: Mapping[str, str] = os.environ) -> Client:
    """The Jobs API at `address`: the URL of the dashboard, or "auto" for a cluster on this machine.

    Raises `ClusterError` where no cluster answers.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    _check_address(address, environ)
    try:
        client: Client = JobSubmissionClient(address, headers=_token_header(environ))
    except AuthenticationError as error:
        raise ClusterError(
            f"The Ray cluster at {address} wants a token, and yours is missing or another one. "
            "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it.",
            address=address,
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ClusterError(
            f"No Ray cluster answers at {address}. Start one with `ray start --head`, or check "
            f"the address. ({_first_line(error)})",
            address=address,
        ) from error
    return client


def submit(client: Client, submission: Submission) -> str:
    """Sends the job and returns its submission id.

    Raises `UserError` where the job is running already (two drivers would write the same run),
    `ClusterError` where the cluster refuses it.
    """
    jobs = list_jobs(client)
    for job in jobs:
        if job.name == submission.name and not job.ended:
            raise UserError(
                f"Job {job.name} is {job.status} already, as {job.submission_id}. "
                "Wait for it or stop it, or give this job another name.",
                submission_id=job.submission_id,
            )
    with working_directory(submission) as directory, _answers():
        return client.submit_job(
            entrypoint=submission.entrypoint,
            submission_id=next_id(submission.name, [job.submission_id for job in jobs]),
            runtime_env={"working_dir": str(directory), "env_vars": dict(submission.env_vars)},
            metadata={NAME_KEY: submission.name},
        )


@contextmanager
def working_directory(submission: Submission) -> Iterator[Path]:
    """The directory to upload; a temporary one where the user did not name his own."""
    if submission.working_dir is not None:
        yield submission.working_dir
        return
    with tempfile.TemporaryDirectory(prefix="pliant-submit-") as name:
        for target, source in submission.files.items():
            shutil.copyfile(source, Path(name) / target)
        yield Path(name)


def next_id(name: str, taken: Iterable[str]) -> str:
    """The name and the first number above all that were used with it."""
    matches = [re.fullmatch(re.escape(name) + r"-(\d+)", other) for other in taken]
    used = [int(match[1]) for match in matches if match]
    return f"{name}-{max(used, default=0) + 1}"


def list_jobs(client: Client) -> list[JobInfo]:
    """Every submission that the cluster remembers, the oldest first."""
    with _answers():
        details = client.list_jobs()
    jobs = [_job_info(each) for each in details if each.submission_id]
    return sorted(jobs, key=_age)


def latest(client: Client, name: str) -> JobInfo | None:
    """The newest submission of the job `name`."""
    return newest(list_jobs(client), name)


def newest(jobs: Iterable[JobInfo], name: str) -> JobInfo | None:
    return max((job for job in jobs if job.name == name), key=_age, default=None)


def status(client: Client, name_or_id: str) -> JobInfo:
    """The submission of that id, or else the newest of that job name.

    Raises `ClusterError`, with the names that the cluster knows, where there is neither.
    """
    jobs = list_jobs(client)
    for job in jobs:
        if job.submission_id == name_or_id:
            return job
    job_of_name = newest(jobs, name_or_id)
    if job_of_name is not None:
        return job_of_name
    known = sorted({job.name for job in jobs})
    listing = f"Known: {', '.join(known)}." if known else "No job was submitted to it so far."
    raise ClusterError(f"The cluster knows no job {name_or_id}. {listing}", known=known)


def logs(client: Client, name_or_id: str, follow: bool = False) -> Iterator[str]:
    """What the job printed, in chunks; with `follow` also what it prints until it ends."""
    submission_id = status(client, name_or_id).submission_id
    with _answers():
        if follow:
            yield from _drain(client.tail_job_logs(submission_id))
        else:
            yield client.get_job_logs(submission_id)


def stop(client: Client, name_or_id: str, wait_s: float = STOP_WAIT_S + 30) -> JobInfo:
    """Asks the job to take a checkpoint and stop, and waits `wait_s` seconds for its end.

    The answer has `ended` False where the job was still at it. A job that ended is left alone.
    """
    job = status(client, name_or_id)
    if job.ended:
        return job
    with _answers():
        client.stop_job(job.submission_id)
    return wait(client, job.submission_id, wait_s)


def wait(client: Client, name_or_id: str, timeout_s: float, poll_s: float = 0.5) -> JobInfo:
    """The job when it has ended, or as it is after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    job = status(client, name_or_id)
    while not job.ended and time.monotonic() < deadline:
        time.sleep(poll_s)
        job = status(client, job.submission_id)
    return job


def _command(names: Sequence[str], runs_dir: str, settings: Sequence[str]) -> str:
    """`exec` leaves no shell between Ray and pliant that could catch the stop signal."""
    spec, *overlays = names
    words = ["exec", "python", "-m", "pliant", "run", spec]
    for overlay in overlays:
        words += ["--overlay", overlay]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join([*words, "--runs-dir", runs_dir, "--address", "auto"])


def _inside(working_dir: Path, path: Path) -> str:
    if not working_dir.is_dir():
        raise UserError(f"--working-dir {working_dir} is not a directory. Name an existing one.")
    try:
        return path.resolve().relative_to(working_dir.resolve()).as_posix()
    except ValueError:
        raise UserError(
            f"{path} is not inside the working directory {working_dir}, which is all that the job "
            "will find. Move it there, or name a directory that holds both.",
            path=path,
        ) from None


def _spec_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that change the spec: the user set them here and means the job there."""
    return {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX)}


def _stop_variables(stop_wait_s: int) -> dict[str, str]:
    """Ray reads them in the job's supervisor, an actor that runs in the job's runtime_env."""
    return {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)}


def _check_address(address: str, environ: Mapping[str, str]) -> None:
    if address != "auto" and not re.match(r"https?://.", address):
        raise ClusterError(
            f"{address} is not the address of a dashboard, where Ray takes jobs. "
            "Use http://HEAD:8265, or auto for a cluster on this machine.",
            address=address,
        )
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        # Ray prefers the variable to the argument, so the job would go elsewhere unnoticed.
        other = environ.get(variable)
        if other and address != "auto" and address.rstrip("/") != other.rstrip("/"):
            raise ClusterError(
                f"The address is {address}, but {variable} is {other}, and Ray would use that. "
                f"Unset {variable}, or leave the address out.",
                address=address,
            )


def _token_header(environ: Mapping[str, str]) -> dict[str, str]:
    if environ.get("RAY_AUTH_MODE"):
        return {}
    token = environ.get("RAY_AUTH_TOKEN") or _token_on_disk(environ)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token_on_disk(environ: Mapping[str, str]) -> str:
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


@contextmanager
def _answers() -> Iterator[None]:
    """Ray's client reports every refusal and lost connection by one of these."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"The cluster refused: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _job_info(details: Any) -> JobInfo:
    return JobInfo(
        submission_id=details.submission_id,
        name=(details.metadata or {}).get(NAME_KEY, details.submission_id),
        status=str(details.status),
        message=details.message or "",
        start_time=_moment(details.start_time),
        end_time=_moment(details.end_time),
        exit_code=details.driver_exit_code,
    )


def _moment(unix_ms: int | None) -> datetime | None:
    return datetime.fromtimestamp(unix_ms / 1000, UTC) if unix_ms else None


def _age(job: JobInfo) -> tuple[datetime, int, str]:
    """Sorts by start; submissions of one millisecond by their number."""
    number = job.submission_id.rpartition("-")[2]
    start = job.start_time or datetime.min.replace(tzinfo=UTC)
    return start, int(number) if number.isdecimal() else 0, job.submission_id


def _drain(chunks: AsyncIterator[str]) -> Iterator[str]:
    async def following() -> str | None:
        return await anext(chunks, None)

    with asyncio.Runner() as runner:
        while (chunk := runner.run(following())) is not None:
            yield chunk
