"""Which checkpoints go, and why the others stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pliant.checkpoints.manifest import Manifest, manifest_in
from pliant.checkpoints.reader import committed
from pliant.checkpoints.writer import age
from pliant.errors import FilesDamaged
from pliant.spec.operations import CheckpointSpec
from pliant.storage.local import Storage
from pliant.storage.opening import open_storage


@dataclass(frozen=True)
class Policy:
    """What is kept; whatever one of these wants stays."""

    last: int = 1
    """So many, the newest first."""
    every: int | None = None
    """Of every so many steps the first checkpoint, for good."""
    best: int = 0
    """So many, the best first."""
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"

    @staticmethod
    def of(spec: CheckpointSpec) -> "Policy":
        return Policy(
            last=spec.keep,
            every=spec.keep_every,
            best=spec.keep_best,
            metric=spec.best_metric,
            mode=spec.best_mode,
        )


@dataclass(frozen=True)
class Found:
    """A directory of ours."""

    name: str
    attempt: int
    step: int
    is_committed: bool
    metric: float | None = None
    """The policy's; None where it was not measured."""


@dataclass(frozen=True)
class Decision:
    """Directory names with the reason for each, the newest first."""

    kept: dict[str, str]
    doomed: dict[str, str]


def decide(
    found: Sequence[Found], policy: Policy, is_idle: bool = False, good: str | None = None
) -> Decision:
    """What stays and what goes. The newest committed checkpoint always stays, and so does `good`,
    the newest that is known to be whole.

    What has no manifest is being written, unless a newer checkpoint was committed since or the job
    is known to be idle: then a dead attempt left it.
    """
    ordered = sorted(found, key=lambda one: (one.attempt, one.step), reverse=True)
    whole = [one for one in ordered if one.is_committed]
    superseded = _superseded(whole)
    wanted = _wanted([one for one in whole if one.name not in superseded], policy)
    if good is not None:
        wanted.setdefault(good, "the newest that is whole")
    kept: dict[str, str] = {}
    doomed: dict[str, str] = {}
    for one in ordered:
        if not one.is_committed:
            is_left = is_idle or (bool(whole) and _age(one) < _age(whole[0]))
            into = doomed if is_left else kept
            into[one.name] = "left by a dead attempt" if is_left else "being written"
        elif one.name in wanted:
            kept[one.name] = wanted[one.name]
        else:
            doomed[one.name] = superseded.get(one.name, "older than what is kept")
    return Decision(kept, doomed)


def prune(
    storage: Storage | Path,
    policy: Policy,
    ledger: Storage | None = None,
    is_idle: bool = False,
    good: str | None = None,
) -> list[str]:
    """Removes what `decide` says; returns its names. With `ledger`, ledger files that no manifest
    names any more go too. One process at a time calls it, after a commit."""
    storage = open_storage(storage)
    found = survey(storage, policy)
    doomed = list(decide(found, policy, is_idle, good).doomed)
    for name in doomed:
        # The marker goes first: a half-removed checkpoint must not look whole.
        storage.delete(manifest_in(name))
        storage.delete_tree(name)
    if ledger is not None:
        left = [one for one in found if one.name not in doomed]
        _prune_ledger(storage, ledger, left, is_idle)
    return doomed


def survey(storage: Storage, policy: Policy) -> list[Found]:
    """All directories of ours. Manifests are read only where the policy asks for a metric."""
    marked = set(committed(storage))
    found = []
    for name in storage.names():
        when = age(name)
        if when is not None:
            is_committed = name in marked
            metric = _metric(storage, name, policy) if is_committed and policy.best else None
            found.append(Found(name, *when, is_committed, metric))
    return found


def _age(one: Found) -> tuple[int, int]:
    return one.attempt, one.step


def _superseded(whole: list[Found]) -> dict[str, str]:
    """Those that a later attempt started behind: it passed them over, because they were damaged,
    and has been there again since."""
    reasons: dict[str, str] = {}
    lowest = math.inf
    for one in whole:
        if one.step >= lowest:
            reasons[one.name] = "passed over by a later attempt"
        lowest = min(lowest, one.step)
    return reasons


def _wanted(good: list[Found], policy: Policy) -> dict[str, str]:
    """Names with the first reason for which each stays."""
    reasons: dict[str, str] = {}
    for one in good[: max(policy.last, 1)]:
        reasons[one.name] = f"one of the last {policy.last}" if policy.last > 1 else "the last"
    for one in _milestones(good, policy.every):
        reasons.setdefault(one.name, f"the first of {policy.every} steps")
    for one in _best(good, policy):
        reasons.setdefault(one.name, f"{policy.metric} {one.metric:.4g} is among the best")
    return reasons


def _milestones(good: list[Found], every: int | None) -> list[Found]:
    """The first at or after each multiple of `every`: checkpoints need not fall on multiples, and
    what was the first stays it."""
    if every is None:
        return []
    first: dict[int, Found] = {}
    for one in sorted(good, key=lambda one: one.step):
        first.setdefault(one.step // every, one)
    return [one for number, one in first.items() if number > 0]


def _best(good: list[Found], policy: Policy) -> list[Found]:
    sign = 1 if policy.mode == "min" else -1
    measured = [(sign * one.metric, one) for one in good if one.metric is not None]
    finite = [(value, one) for value, one in measured if math.isfinite(value)]
    ordered = sorted(finite, key=lambda pair: pair[0])  # stable: of equals the newest
    return [one for _, one in ordered[: policy.best]]


def _metric(storage: Storage, name: str, policy: Policy) -> float | None:
    try:
        return Manifest.read(storage, name).metrics.get(policy.metric)
    except FilesDamaged:
        return None


def _prune_ledger(storage: Storage, ledger: Storage, left: list[Found], is_idle: bool) -> None:
    """Removes ledger files that nothing names; what is newer than the newest checkpoint may be
    about to be named. Where a manifest cannot be read, nothing is known and nothing goes."""
    whole = [one for one in left if one.is_committed]
    newest = max(map(_age, whole), default=(-1, -1))
    names = {name: age(name.removesuffix(".parquet")) for name in ledger.names()}
    old = {n for n, when in names.items() if when is not None and (is_idle or when < newest)}
    try:
        for one in sorted(whole, key=_age, reverse=True):
            if not old:
                return  # the newest manifest names nearly all: as a rule no other is read
            old -= {entry.file for entry in Manifest.read(storage, one.name).ledger}
    except FilesDamaged:
        return
    for name in sorted(old):
        ledger.delete(name)
