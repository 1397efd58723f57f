"""The end of a job whose disk takes nothing any more."""

from types import SimpleNamespace

import pytest

from pliant.errors import JobError
from pliant.tracking import Journal
from pliant.tracking.mlflow_tracker import JOURNAL_FILE
from pliant.training import conclusion


class RecorderHere:
    """A recorder without its process: a call is answered where it is made."""

    def __init__(self, answers):
        self._answers = answers
        self.calls = []

    def __getattr__(self, name):
        def remote(*arguments):
            self.calls.append((name, arguments))
            return self._answers.get(name)

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("error", [None, JobError("A worker died.", details="its traceback")])
def test_a_summary_that_cannot_be_written_is_told_and_the_record_is_closed(
    tmp_path, monkeypatch, error
):
    monkeypatch.setattr(conclusion, "ray", SimpleNamespace(get=lambda it: it, kill=lambda it: None))
    for name in ("summary.json", "error.txt"):
        (tmp_path / name).mkdir()  # where nothing can be written
    Journal(tmp_path / JOURNAL_FILE).append({"time": 1.0, "kind": "job", "pid": 1})
    spec = SimpleNamespace(
        name="full",
        checkpoint=SimpleNamespace(storage=None),
        training=SimpleNamespace(steps=5),
    )
    task = SimpleNamespace(spec=spec, run_dir=tmp_path, grid=None)
    recorder = RecorderHere({"run_id": "abc", "finish": 3})
    stop = SimpleNamespace(is_set=lambda: False)

    outcome = conclusion.conclude(task, recorder, "uri", error, stop)

    assert recorder.calls[-1] == ("finish", ("FAILED", conclusion.TRACKING_DEADLINE_S))
    assert outcome.unsent_events == 3
    assert isinstance(outcome.error, JobError)
    if error is None:
        assert "summary could not be written" in outcome.error.message
        assert "There is no checkpoint." in outcome.error.message
    else:
        assert outcome.error.message == "A worker died."
