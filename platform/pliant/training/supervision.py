"""Watches over the ranks of a job, in the recorder: hung and slow ones, and a job that stands
still."""

import threading
import time
from collections.abc import Callable
from typing import Any

from pliant.elastic.beats import Beat
from pliant.elastic.watchdog import Action, Alarm, Dump, Kill, Slow, Watchdog
from pliant.spec.elastic import ElasticSpec

LOOK_EVERY_S = 1.0


class Supervision:
    """Hears the ranks' beats and turns what the watchdog says into events and kills."""

    def __init__(self, settings: ElasticSpec, tell: Callable[[dict[str, Any]], object]) -> None:
        """`tell` takes events."""
        self._watchdog = Watchdog(settings)
        self._tell = tell
        self._lock = threading.Lock()
        self._doomed: tuple[int, ...] = ()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="supervision").start()

    def beat(self, beat: Beat) -> bool:
        """A sign of life; whether the rank shall write down its stacks."""
        with self._lock:
            return self._watchdog.hear(beat, time.monotonic())

    def attempt_over(self) -> None:
        """Nothing is expected of the ranks until the next attempt."""
        with self._lock:
            self._watchdog.end()
            self._doomed = ()

    def take_doomed(self) -> tuple[int, ...]:
        """Ranks whose process is to be ended; told once."""
        with self._lock:
            doomed, self._doomed = self._doomed, ()
            return doomed

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            with self._lock:
                actions = self._watchdog.look(time.monotonic())
                for action in actions:
                    if isinstance(action, Kill):
                        self._doomed += action.ranks
            for action in actions:
                self._tell(_event(action))


def _event(action: Action) -> dict[str, Any]:
    match action:
        case Dump(reason):
            text = f"{reason} The ranks are asked for their stacks."
            return {"kind": "alarm", "what": "hang", "text": text}
        case Kill(ranks=ranks, reason=reason):
            named = ", ".join(map(str, ranks))
            text = f"the worker of rank {named} is ended: {reason}"
            return {"kind": "alarm", "what": "hang", "text": text}
        case Alarm(sentence):
            return {"kind": "alarm", "what": "no progress", "text": sentence}
        case Slow(sentence=sentence):
            return {"kind": "alarm", "what": "straggler", "text": sentence}
