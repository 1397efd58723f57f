"""What follows a failure: another attempt, after a while, on which nodes, or the end of the job.

Pure decisions over the failures of a job, oldest first.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pliant.errors import FilesDamaged, PliantError, RanksDisagree
from pliant.spec.elastic import ElasticSpec

SAME_FAILURES = 3
"""So many failures in a row that are alike will not end by trying again."""

BACKOFF_S = 1.0
"""The second restart without progress waits for so long."""

NODE_MEMORY_S = 24 * 3600.0
"""Failures of a node are held against it for so long."""


@dataclass(frozen=True)
class Failure:
    """A worker group ended before its time."""

    time_s: float
    """Unix seconds."""
    step: int
    """The step that was being done."""
    saved_step: int
    """The step that the next attempt goes on from."""
    error: str
    """One clause, such as "the worker of rank 1 died"."""
    kind: Literal["crash", "preemption", "resize"] = "crash"
    died: tuple[int, ...] = ()
    """Ranks whose process died, as against raised."""
    nodes: tuple[str, ...] = ()
    """Ids of the nodes that it is put down to; see `is_hardware`."""
    is_final: bool = False
    """The next attempt would only meet it again; see `is_final`."""

    @property
    def signature(self) -> tuple[int, tuple[int, ...], str]:
        """Equal for two failures that are alike."""
        return self.step, self.died, without_numbers(self.error)


@dataclass(frozen=True)
class Restart:
    """Another attempt."""

    delay_s: float
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """No further attempt."""

    reason: str


def decide(settings: ElasticSpec, history: Sequence[Failure], failure: Failure) -> Restart | GiveUp:
    """What follows `failure`, after those of `history`."""
    failures = [*history, failure]
    if failure.is_final:
        return GiveUp(failure.error)
    if failure.kind != "crash":
        return Restart(0.0, f"{failure.error}; a {failure.kind} is not counted")
    if _is_deterministic(failures):
        return GiveUp(
            f"Step {failure.step} failed {SAME_FAILURES} times in a row in the same way: "
            f"{failure.error}. Another attempt would only meet it again. Look at that step's data "
            "and at the code that ran."
        )
    count = count_without_progress(failures, settings.progress_steps)
    if count > settings.max_restarts:
        return GiveUp(_exhausted(settings, failure))
    delay_s = backoff_s(count, settings.max_backoff_s)
    wait = f", in {delay_s:g} s" if delay_s else ""
    return Restart(delay_s, f"{failure.error}; restart {count} of {settings.max_restarts}{wait}")


def count_without_progress(failures: Sequence[Failure], progress_steps: int) -> int:
    """How many crashes there were, the last one included, since `progress_steps` new steps were
    last made safe."""
    count, best = 0, 0
    for failure in failures:
        if failure.saved_step - best >= progress_steps:
            count, best = 0, failure.saved_step
        count += failure.kind == "crash"
    return count


def backoff_s(restart: int, limit_s: float) -> float:
    """How long restart number `restart`, counted from 1, waits: 0, 1, 2, 4, ... seconds."""
    return 0.0 if restart <= 1 else min(limit_s, BACKOFF_S * 2.0 ** min(restart - 2, 30))


def is_final(error: BaseException) -> bool:
    """Whether what a worker raised would only come again: what pliant raises on purpose does,
    except where state was damaged that an earlier checkpoint may have whole."""
    return isinstance(error, PliantError) and not isinstance(error, RanksDisagree | FilesDamaged)


_HARDWARE = re.compile(
    r"uncorrectable|\becc error|fallen off the bus|hardware stack|gpu is lost|nvlink error|\bxid\b",
    re.IGNORECASE,
)


def is_hardware(error: str) -> bool:
    """Whether an error's text puts it down to the machine, so that its node is to be named."""
    return _HARDWARE.search(error) is not None


_NUMBERS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)*", re.IGNORECASE)


def without_numbers(error: str) -> str:
    """The text with every number, address, id and pid replaced: what repeats when an error does."""
    return " ".join(_NUMBERS.sub("#", error).split())


@dataclass(frozen=True)
class Exclusions:
    """Nodes and why they are distrusted."""

    left_out: Mapping[str, str]
    kept: Mapping[str, str]
    """Distrusted as well, but the job needs them."""


def exclude_nodes(
    settings: ElasticSpec,
    history: Sequence[Failure],
    broken: Mapping[str, str],
    room: Mapping[str, int],
    now_s: float,
    num_needed: int = 1,
) -> Exclusions:
    """Which of the living nodes to leave out of the next worker group.

    `room` is how many workers each node could hold if nothing ran there; `broken` names nodes that
    failed a health check and says why. Those with broken hardware go first, then those with the
    most failures, as long as the others have room for `num_needed` workers.
    """
    counts = Counter(
        node
        for failure in history
        if failure.kind == "crash" and now_s - failure.time_s <= NODE_MEMORY_S
        for node in set(failure.nodes)
    )
    reasons = {
        node: broken.get(node) or f"worker deaths there within a day: {counts[node]}"
        for node in room
        if node in broken or counts[node] >= settings.max_node_failures
    }
    left_out: dict[str, str] = {}
    kept: dict[str, str] = {}
    there = sum(room.values())
    for node in sorted(reasons, key=lambda node: (node not in broken, -counts[node], node)):
        can_go = there - room[node] >= num_needed
        (left_out if can_go else kept)[node] = reasons[node]
        there -= room[node] if can_go else 0
    return Exclusions(left_out, kept)


def _is_deterministic(failures: Sequence[Failure]) -> bool:
    crashes = [failure for failure in failures if failure.kind == "crash"][-SAME_FAILURES:]
    return len(crashes) == SAME_FAILURES and len({crash.signature for crash in crashes}) == 1


def _exhausted(settings: ElasticSpec, failure: Failure) -> str:
    if settings.max_restarts == 0:
        return f"{failure.error}, and elastic.max_restarts is 0."
    return (
        f"{failure.error}. This was after {settings.max_restarts} restarts without "
        f"{settings.progress_steps} new safe steps. Find the cause, or raise elastic.max_restarts."
    )
