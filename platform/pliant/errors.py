"""Every error that a user of pliant may see.

    PliantError               exit code 3
    ├── UserError             2   the user's input: nothing was started, nothing is left behind
    │   ├── SpecError             a job spec that cannot be used
    │   ├── DataError             data that is missing, empty or malformed
    │   ├── ModelError            a model that cannot be built, or that pliant must refuse
    │   ├── CheckpointMismatch    a checkpoint that belongs to another model or job
    │   ├── NoSpace               a disk without room for what is about to be written
    │   └── ClusterError          a cluster that cannot be reached or is too small
    ├── JobError              3   the job failed
    │   ├── FilesDamaged          stored files that are not what was written
    │   ├── RanksDisagree         ranks whose parameters differ
    │   └── TrainingDiverged      a loss that is not a finite number, or that leapt up
    ├── TrainingRewinds       3   training goes back to the last checkpoint to leave out a step
    ├── Interrupted           4   stopped on request, after a checkpoint
    └── NegativeVerdict       5   a check was carried out and said no

A message says what was found, what was needed and what to do. The facts behind it are attributes,
and an error survives pickling, since most are raised in one process and shown in another.
"""

from typing import Any


class PliantError(Exception):
    """The root of the tree. `facts` become attributes of the error."""

    exit_code = 3

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[PliantError], message: str, facts: dict[str, Any]) -> PliantError:
    return kind(message, **facts)


class UserError(PliantError):
    """The user's input cannot be used as it is."""

    exit_code = 2


class SpecError(UserError):
    """A job spec that cannot be used."""


class DataError(UserError):
    """Data that is missing, empty or malformed."""


class ModelError(UserError):
    """A model that cannot be built, or that pliant refuses to train wrongly."""


class CheckpointMismatch(UserError):
    """A checkpoint that belongs to another model or job."""


class NoSpace(UserError):
    """A disk without room for what is about to be written."""


class ClusterError(UserError):
    """A cluster that cannot be reached or is too small."""


class JobError(PliantError):
    """The job was started and failed."""


class FilesDamaged(JobError):
    """Stored files, such as a checkpoint's, that are not what was written."""


class RanksDisagree(JobError):
    """Ranks whose parameters differ although they must be equal."""


class TrainingDiverged(JobError):
    """A loss or gradient that is not a finite number, or a loss that leapt up."""


class TrainingRewinds(PliantError):
    """Training is to go back to the last checkpoint and to leave out the update of `step`."""


class Interrupted(PliantError):
    """The job stopped on request, after a checkpoint."""

    exit_code = 4


class NegativeVerdict(PliantError):
    """A check was carried out and its answer is no."""

    exit_code = 5
