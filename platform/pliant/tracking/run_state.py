"""What is known of a job's MLflow run between processes: `mlflow.json` in the run directory."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pliant.errors import UserError
from pliant.files import write_atomically

STATE_FILE = "mlflow.json"
Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass
class RunState:
    """Where the run is, what describes it, and how far the journal has been sent."""

    uri: str
    experiment: str
    run_name: str
    tags: dict[str, str]
    params: dict[str, str]
    start_time_ms: int
    key: str = field(default_factory=lambda: uuid4().hex)
    """Marks the run on the server, so that one created just before a crash is found again."""
    run_id: str | None = None
    offset: int = 0
    """Bytes of the journal whose events the server has accepted."""
    artifacts: list[list[str | None]] = field(default_factory=list)
    """Files still to be sent, as (path, artifact_path): met in the journal before `offset`."""
    status: Status | None = None
    """How the job ended; None while it runs."""
    end_time_ms: int | None = None
    ended: bool = False
    """Whether the server knows `status`."""

    def resume(self, known: "RunState") -> None:
        """Go on with the run of `known`; its tags, parameters and name are taken from here."""
        self.key, self.run_id = known.key, known.run_id
        self.offset, self.artifacts = known.offset, known.artifacts
        self.start_time_ms = known.start_time_ms

    def forget_run(self) -> None:
        """Start anew, from the first event of the journal."""
        self.key, self.run_id, self.offset, self.artifacts = uuid4().hex, None, 0, []


def load_state(run_dir: Path) -> RunState | None:
    """The state kept in `run_dir`; None if there is none.

    Raises UserError if the file is not a run state.
    """
    path = run_dir / STATE_FILE
    try:
        return RunState(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is not the state of an MLflow run ({error}). Remove it to record the run "
            "anew from its journal.",
            path=str(path),
        ) from error


def save_state(run_dir: Path, state: RunState) -> None:
    write_atomically(run_dir / STATE_FILE, json.dumps(asdict(state), indent=2).encode() + b"\n")
