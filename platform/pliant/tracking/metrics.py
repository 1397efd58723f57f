"""Every metric that a run records, with its unit and meaning; `docs/metrics.md` is made of it."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


TRAINING = (
    Metric("loss", "nats per token", "Mean loss of the step's target tokens, over all ranks."),
    Metric("lr", "1", "Learning rate of the step."),
    Metric("grad_norm", "1", "Norm of the gradient before clipping."),
    Metric("step_time_s", "s", "From the start of the step to the start of the next."),
    Metric("data_wait_s", "s", "Part of the step spent waiting for data; the slowest rank's."),
    Metric("samples_per_s", "1/s", "Samples of the step over its time."),
    Metric("tokens_per_s", "1/s", "Tokens of the step, without padding, over its time."),
    Metric("fill_ratio", "0 to 1", "Tokens of the step over the room of its rows."),
    Metric("world_size", "ranks", "Ranks that computed the step."),
    Metric("tokens_seen", "tokens", "Tokens, without padding, from the first step to this one."),
    Metric("epoch", "epochs", "Place in the data; 1.5 is half-way through the second pass."),
    Metric("restarts", "1", "Worker groups started after a failure so far."),
    Metric("steps_lost", "steps", "Steps done and then redone because of restarts so far."),
)
OCCASIONAL = (
    Metric("eval_loss", "nats per token", "Mean loss of the validation set's target tokens."),
    Metric("test_loss", "nats per token", "Mean loss of the test set's target tokens, at the end."),
    Metric("alarms", "1", "Alarms so far: hangs, stragglers, failed saves. See tag pliant.alarm."),
    Metric("checkpoint_s", "s", "From the request of a checkpoint until it was complete."),
    Metric("checkpoint_stall_s", "s", "Of that, how long training was held up; the slowest rank."),
)
DATA = (
    Metric("data/samples", "samples", "Records that were tokenized."),
    Metric("data/filtered", "records", "Dropped by the transform."),
    Metric("data/bad", "records", "Could not be used and were skipped."),
    Metric("data/pieces", "pieces", "What the samples were cut into, as far as they are kept."),
    Metric("data/tokens", "tokens", "Of all samples; the sum of the next six."),
    Metric("data/trained", "tokens", "Targets."),
    Metric("data/masked", "tokens", "Kept and no targets."),
    Metric("data/overlong_truncated", "tokens", "Cut off beyond seq_len."),
    Metric("data/overlong_dropped", "tokens", "Of samples dropped for being too long."),
    Metric("data/no_targets", "tokens", "Of samples and pieces without a target."),
    Metric("data/empty", "tokens", "Of samples without text."),
    Metric("data/samples_truncated", "samples", "Cut off at seq_len."),
    Metric("data/samples_overlong", "samples", "Dropped for being too long."),
    Metric("data/samples_untrained", "samples", "Dropped for having no target."),
    Metric("data/samples_empty", "samples", "Dropped for having no text."),
    Metric("data/rows", "rows", "Of the first epoch."),
    Metric("data/epoch_tokens", "tokens", "In these rows."),
    Metric("data/padding", "tokens", "What is left of the room of these rows."),
)
SYSTEM = (
    Metric("system/cpu_utilization_percentage", "%", "All cores, since the last sample."),
    Metric("system/system_memory_usage_megabytes", "MB", "Memory in use."),
    Metric("system/system_memory_usage_percentage", "%", "Memory in use."),
    Metric("system/disk_usage_percentage", "%", "Root file system in use."),
    Metric("system/disk_usage_megabytes", "MB", "Root file system in use."),
    Metric("system/disk_available_megabytes", "MB", "Root file system free."),
    Metric("system/network_receive_megabytes", "MB", "Received since the tracker started."),
    Metric("system/network_transmit_megabytes", "MB", "Sent since the tracker started."),
    Metric("system/gpu_N_utilization_percentage", "%", "GPU N was computing."),
    Metric("system/gpu_N_memory_usage_percentage", "%", "Memory of GPU N in use."),
    Metric("system/gpu_N_memory_usage_megabytes", "MB", "Memory of GPU N in use."),
    Metric("system/gpu_N_power_usage_watts", "W", "Power drawn by GPU N."),
    Metric("system/gpu_N_power_usage_percentage", "%", "Of the power limit of GPU N."),
)
METRICS = TRAINING + OCCASIONAL + DATA + SYSTEM

_PAGE = """\
# Metrics of a run

A job is one MLflow run, through every restart and resize. The run's metrics come from
`events.jsonl` in its directory, which stays complete while MLflow cannot be reached; what is
waiting is sent once it is back. A metric has one value a step: steps that a restart redoes are
not sent again.

This page is generated: `python -m pliant.tracking.metrics docs/metrics.md`.

## Every step

{training}

## Evaluations and checkpoints

{occasional}

## The data

Of the training split, recorded once at step 0.

{data}

## The machine

Sampled every `tracking.system_metrics_every_s` seconds and recorded at the last training step;
while steps are being redone, at the highest one so far. GPUs need the extra `pliant[gpu]`.

{system}
"""


def page() -> str:
    """The text of `docs/metrics.md`."""
    return _PAGE.format(
        training=_table(TRAINING),
        occasional=_table(OCCASIONAL),
        data=_table(DATA),
        system=_table(SYSTEM),
    )


def _table(metrics: tuple[Metric, ...]) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
    return "\n".join(["| Metric | Unit | Meaning |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
