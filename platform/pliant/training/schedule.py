"""The learning rate of a step: a pure function, so that a resumed run needs no state for it."""

import math

from pliant.spec.training import TrainingSpec


def learning_rate(spec: TrainingSpec, step: int) -> float:
    """Of step number `step`, counted from 0, of `spec.steps`."""
    assert spec.steps is not None
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    span = max(spec.steps - spec.warmup_steps, 1)
    done = min((step - spec.warmup_steps) / span, 1.0)
    if spec.schedule == "linear":
        share = 1.0 - done
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * share)
