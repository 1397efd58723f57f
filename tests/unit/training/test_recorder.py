"""The job's record, where the disk does not take it."""

import errno
from pathlib import Path

from fakes.jobs import tiny_spec
from pliant.tracking import Journal
from pliant.training.recorder import Recorder

NOWHERE = "http://127.0.0.1:9"
"""MLflow does not answer here."""


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch
) -> None:
    recorder = Recorder(tmp_path, tiny_spec(), NOWHERE, {})
    is_full, append = True, Journal.append

    def on_a_full_disk(journal: Journal, event: dict[str, object]) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, event)

    monkeypatch.setattr(Journal, "append", on_a_full_disk)
    for step in (1, 2):
        recorder.record([{"kind": "step", "step": step, "metrics": {}, "time": float(step)}])
    assert recorder.status().step == 2
    is_full = False
    recorder.append({"kind": "note", "text": "there is room"})
    recorder.finish("FINISHED", deadline_s=0)
    events = list(Journal(tmp_path / "events.jsonl").events())
    told = [event for event in events if event["kind"] in ("step", "note")]
    assert [event.get("step") for event in told] == [1, 2, None]
    assert [event["time"] for event in told[:2]] == [1.0, 2.0]  # when they came about


def test_a_journal_that_cannot_be_written_is_told_once(tmp_path: Path, monkeypatch) -> None:
    recorder = Recorder(tmp_path, tiny_spec(), NOWHERE, {})

    def fail(journal: Journal, event: dict[str, object]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "append", fail)
    for step in (1, 2, 3):
        recorder.record([{"kind": "step", "step": step, "metrics": {}}])
    told = [text for text in recorder.status().news if "cannot be written" in text]
    assert told == [
        "the journal cannot be written, training goes on: [Errno 28] No space left on device"
    ]
