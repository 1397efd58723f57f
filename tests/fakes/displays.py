"""Displays and stop signals for tests of whole jobs."""

from collections.abc import Callable
from typing import Any


class RecordedDisplay:
    """Keeps what a person would have been told."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self.lines: list[str] = []
        self._on_step = on_step

    def say(self, sentence: str) -> None:
        self.lines.append(sentence)

    def prepared(self, done: int, total: int) -> None:
        return

    def update(self, status: Any, total_steps: int) -> None:
        self.lines += status.news
        self._on_step(status.step)
