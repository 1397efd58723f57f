"""Accelerators that are as healthy as the test says, and an NVML to ask."""

from dataclasses import replace
from typing import Any

from pliant.elastic.health import CardReading

SOUND = CardReading(
    uuid="GPU-1111",
    name="H200",
    index=0,
    uncorrected_ecc=0,
    retired_pages=0,
    remap_failed=False,
    temperature_c=60,
    slowdown_c=90,
    clock_events=0x04,
)


class FakeCards:
    """Answers each reading with the next state of its one card; the last one stays."""

    def __init__(self, *changes: dict[str, Any]) -> None:
        self._states = [replace(SOUND, **change) for change in changes]

    def read(self) -> list[CardReading]:
        state = self._states[0]
        if len(self._states) > 1:
            self._states.pop(0)
        return [state]


class FakeNvml:
    """pynvml, as far as it is used: two cards, of which the second no longer answers, and which
    do not know about retired pages."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, card: int) -> str:
        return SOUND.uuid

    def nvmlDeviceGetName(self, card: int) -> str:
        return SOUND.name

    def nvmlDeviceGetTotalEccErrors(self, card: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return 3

    def nvmlDeviceGetRetiredPages(self, card: int, cause: int) -> list[int]:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetRemappedRows(self, card: int) -> tuple[int, int, int, int]:
        return 4, 0, 0, 1

    def nvmlDeviceGetTemperature(self, card: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetTemperatureThreshold(self, card: int, threshold: int) -> int:
        return 92

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: int) -> int:
        return 0x44
