"""The machine's own metrics, as MLflow's collectors measure them."""

from functools import cache
from typing import Any

from pliant.tracking import mlflow_library

_COLLECTORS = (
    ("cpu_monitor", "CPUMonitor"),
    ("disk_monitor", "DiskMonitor"),
    ("network_monitor", "NetworkMonitor"),
    ("gpu_monitor", "GPUMonitor"),
)


def sample() -> dict[str, float]:
    """CPU, memory, disk, network and, with pynvml, GPU use of this machine, named `system/...`.

    CPU use is the average since the last call, network traffic the sum since the first. The first
    call imports MLflow (1 to 2 s).
    """
    values: dict[str, float] = {}
    for collector in _collectors():
        collector.collect_metrics()
        values |= {f"system/{k}": float(v) for k, v in collector.aggregate_metrics().items()}
        collector.clear_metrics()
    return values


@cache
def _collectors() -> tuple[Any, ...]:
    made = []
    for module, name in _COLLECTORS:
        kind = getattr(mlflow_library.load(f"mlflow.system_metrics.metrics.{module}"), name)
        try:
            made.append(kind())
        except (ImportError, RuntimeError):  # no pynvml, or no GPU: nothing to measure
            continue
    return tuple(made)
