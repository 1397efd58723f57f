import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pliant.tracking import Journal


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "time": 100.0 + number, "step": number, "metrics": {"loss": 1.5}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "bee" / "events.jsonl"


def test_events_are_read_as_they_were_written_from_any_offset(path: Path) -> None:
    journal = Journal(path)
    for number in range(3):
        journal.append(step(number))
    read = list(journal.read())
    assert [event for event, _ in read] == [step(number) for number in range(3)]
    assert read[-1][1] == path.stat().st_size == journal.size_bytes()
    assert list(journal.read(read[0][1])) == read[1:]
    assert list(journal.read(read[-1][1])) == []


def test_a_journal_without_a_file_is_empty(path: Path) -> None:
    assert list(Journal(path).read()) == []
    assert Journal(path).size_bytes() == 0


def test_an_event_without_a_time_gets_the_present_one(path: Path) -> None:
    Journal(path).append({"kind": "note", "text": "a ø 中"})
    event = next(Journal(path).events())
    assert event["text"] == "a ø 中"
    assert abs(event["time"] - path.stat().st_mtime) < 5


def test_numbers_of_numpy_and_paths_become_plain_values(path: Path) -> None:
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": float("nan")}
    Journal(path).append({"kind": "step", "metrics": values, "path": Path("x/y")})
    event = next(Journal(path).events())
    assert event["metrics"]["a"] == 0.5
    assert event["metrics"]["b"] == 3
    assert np.isnan(event["metrics"]["c"])
    assert event["path"] == "x/y"


@pytest.mark.parametrize("length", [1, 200_000])
def test_a_torn_last_line_is_not_read_and_cut_off_by_the_next_writer(
    path: Path, length: int
) -> None:
    Journal(path).append(step(1))
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"{" * length)
    assert [event for event, _ in Journal(path).read()] == [step(1)]
    journal = Journal(path)
    journal.append(step(2))
    assert list(journal.events()) == [step(1), step(2)]
    assert journal.size_bytes() == 2 * whole


def test_a_file_that_is_one_torn_line_is_emptied(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"kind": "st')
    Journal(path).append(step(1))
    assert list(Journal(path).events()) == [step(1)]


def test_a_damaged_line_is_passed_over(path: Path) -> None:
    journal = Journal(path)
    journal.append(step(1))
    with path.open("ab") as file:
        file.write(b"\0\0\0\n")
    journal.append(step(2))
    assert [event["kind"] for event in journal.events()] == ["step", "damaged", "step"]


def test_threads_share_a_writer(path: Path) -> None:
    journal = Journal(path)
    numbers = range(0, 400, 100)

    def write(first: int) -> None:
        for number in range(first, first + 100):
            journal.append(step(number))

    threads = [threading.Thread(target=write, args=(first,)) for first in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.sync()
    journal.close()
    assert sorted(event["step"] for event in journal.events()) == list(range(400))


def test_a_write_that_does_not_fit_leaves_the_file_as_it_was(path: Path) -> None:
    """A file size limit stands for a full disk: both cut a write short."""
    program = f"""
import resource, signal
from pathlib import Path
from pliant.tracking import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(path)!r}))
journal.append({{"kind": "note", "time": 1.0, "text": "x"}})
size = journal.size_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    journal.append({{"kind": "note", "time": 2.0, "text": "y"}})
except OSError:
    pass
else:
    raise SystemExit("it fitted")
assert journal.size_bytes() == size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journal.append({{"kind": "note", "time": 3.0, "text": "z"}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [event["time"] for event in Journal(path).events()] == [1.0, 3.0]


def test_what_a_killed_writer_appended_is_there(path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from pliant.tracking import Journal
journal = Journal(Path({str(path)!r}))
for number in range(50):
    journal.append({{"kind": "step", "step": number}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert [json.loads(line)["step"] for line in path.open()] == list(range(50))
