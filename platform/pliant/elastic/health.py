"""The health of accelerators, read through NVML where there are any.

A reading costs a few milliseconds and touches no CUDA context. Where there is no NVIDIA driver, or
nvidia-ml-py (the `gpu` extra) is not installed, there are no cards and nothing is done.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

PERSISTENT = 3
"""Heat and throttling count when so many readings in a row show them."""

MAX_RETIRED_PAGES = 60
"""NVIDIA has a card replaced when this many memory pages are retired; 64 is all it can retire
(https://docs.nvidia.com/deploy/dynamic-page-retirement)."""

HW_SLOWDOWNS = {
    0x08: "a slowdown by the hardware",
    0x40: "a slowdown by the hardware for heat",
    0x80: "a slowdown by the power supply",
}
"""Bits of NVML's clock event reasons that a sound card in a sound machine does not show. A power
cap (0x04) or a slowdown by the driver for heat (0x20) is everyday."""


@dataclass(frozen=True)
class CardReading:
    """What a card told at one time; None where it does not know."""

    uuid: str
    name: str
    index: int
    """NVML's, which does not follow CUDA_VISIBLE_DEVICES."""
    uncorrected_ecc: int | None = None
    """Errors of memory that could not be corrected, since the driver was loaded."""
    retired_pages: int | None = None
    """Pages retired for double bit errors."""
    remap_failed: bool | None = None
    """A row of memory could not be replaced."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The temperature at which the hardware slows itself down."""
    clock_events: int | None = None
    """NVML's bit mask of what holds the clocks down."""
    lost: str = ""
    """What NVML said, where the card does not answer at all."""


@dataclass(frozen=True)
class Healthy:
    """Nothing speaks against the card."""


@dataclass(frozen=True)
class Unhealthy:
    """The card must not be used."""

    reason: str


def judge(readings: Sequence[CardReading]) -> Healthy | Unhealthy:
    """From a card's readings of this job, oldest first, the present one last; at least one."""
    first, now = readings[0], readings[-1]
    recent = readings[-PERSISTENT:]
    reason = _broken(first, now) or (_strained(recent) if len(recent) == PERSISTENT else "")
    return Unhealthy(f"{now.name} number {now.index}: {reason}") if reason else Healthy()


def _broken(first: CardReading, now: CardReading) -> str:
    if now.lost:
        return f"it does not answer ({now.lost})"
    new_errors = (now.uncorrected_ecc or 0) - (first.uncorrected_ecc or 0)
    if new_errors > 0:
        return f"{new_errors} new uncorrectable memory errors"
    if now.remap_failed:
        return "a broken row of its memory could not be replaced"
    if (now.retired_pages or 0) >= MAX_RETIRED_PAGES:
        return f"{now.retired_pages} retired memory pages, and {MAX_RETIRED_PAGES} are too many"
    return ""


def _strained(recent: Sequence[CardReading]) -> str:
    if all(reading.temperature_c and _is_hot(reading) for reading in recent):
        now = recent[-1]
        return f"{now.temperature_c} C, and it slows down from {now.slowdown_c} C on"
    for bit, what in HW_SLOWDOWNS.items():
        if all((reading.clock_events or 0) & bit for reading in recent):
            return f"{what}, in {len(recent)} readings in a row"
    return ""


def _is_hot(reading: CardReading) -> bool:
    return reading.slowdown_c is not None and (reading.temperature_c or 0) >= reading.slowdown_c


class Cards(Protocol):
    """Where readings come from."""

    def read(self) -> list[CardReading]:
        """One reading of each card that this process may use."""


class CheckCards:
    """Remembers readings and names the cards that fail."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards
        self._readings: dict[str, list[CardReading]] = {}

    def check(self) -> list[str]:
        """The reasons against this process's cards; empty where all are well."""
        verdicts = [judge(self._remember(reading)) for reading in self._cards.read()]
        return [verdict.reason for verdict in verdicts if isinstance(verdict, Unhealthy)]

    def _remember(self, reading: CardReading) -> list[CardReading]:
        kept = self._readings.setdefault(reading.uuid, [])
        # The first is what errors are counted from.
        kept[:] = [*kept[:1], *kept[1:][-PERSISTENT:], reading]
        return kept


class NoCards:
    """A machine without accelerators, or without a way to ask them."""

    def read(self) -> list[CardReading]:
        return []


class NvmlCards:
    """NVIDIA cards. A question that a card does not support is answered with None."""

    def __init__(self, nvml: Any, environ: Mapping[str, str]) -> None:
        self._nvml = nvml
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")

    def read(self) -> list[CardReading]:
        readings = [self._reading(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        return [reading for reading in readings if is_visible(reading, self._visible)]

    def _reading(self, index: int) -> CardReading:
        nvml = self._nvml
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(card), nvml.nvmlDeviceGetName(card)
        except nvml.NVMLError as error:
            return CardReading(uuid=f"number {index}", name="GPU", index=index, lost=str(error))
        return CardReading(
            uuid=uuid,
            name=name,
            index=index,
            uncorrected_ecc=self._ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                card,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            retired_pages=self._ask(
                lambda card, cause: len(nvml.nvmlDeviceGetRetiredPages(card, cause)),
                card,
                nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
            ),
            remap_failed=self._ask(
                lambda card: bool(nvml.nvmlDeviceGetRemappedRows(card)[3]), card
            ),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=self._ask(
                nvml.nvmlDeviceGetTemperatureThreshold,
                card,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            clock_events=self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, card),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def is_visible(reading: CardReading, visible: str | None) -> bool:
    """Whether a process with this CUDA_VISIBLE_DEVICES may use the card; None is all. A card that
    does not tell its id is known by its number."""
    if visible is None:
        return True
    named = [part.strip() for part in visible.split(",") if part.strip()]
    return any(
        part == str(reading.index) or (not part.isdigit() and reading.uuid.startswith(part))
        for part in named
    )


def open_cards(environ: Mapping[str, str] = os.environ) -> Cards:
    """This process's cards; without NVIDIA's driver and library there are none."""
    nvml = _nvml()
    return NvmlCards(nvml, environ) if nvml is not None else NoCards()


def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
