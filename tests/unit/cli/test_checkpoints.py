"""`pliant checkpoints` tells and does what the run's spec says, and never what it must not."""

import json

import pytest

from fakes.checkpoints import commit
from fakes.jobs import tiny_spec
from fakes.runs import save_model, trained_model, write_run
from pliant.checkpoints.places import places_of
from pliant.checkpoints.writer import directory_name
from pliant.cli.main import main
from pliant.cli.stored import parse_size
from pliant.errors import UserError
from pliant.files import file_lock


def name_of(step, attempt=1):
    return directory_name(step, attempt, 2)


@pytest.fixture
def pliant(tmp_path, capsys):
    """Runs a command on the runs of this test; (exit code, what it printed, its complaint)."""

    def run(command, *arguments):
        code = main(["checkpoints", command, *arguments, "--runs-dir", str(tmp_path)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_dir(tmp_path):
    """A run with four checkpoints, of which its spec keeps the last and the best."""
    directory = tmp_path / "mine"
    write_run(directory, tiny_spec({"checkpoint": {"keep": 1, "keep_best": 1}}))
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (20, 2.5)):
        save(directory, step, metrics={"eval_loss": loss})
    return directory


def save(directory, step, **changes):
    return commit(directory / "checkpoints", directory / "ledger", step, **changes)


def left(directory):
    return sorted(int(path.name[5:13]) for path in (directory / "checkpoints").iterdir())


def test_the_list_says_why_each_is_kept(pliant, run_dir):
    half = run_dir / "checkpoints" / name_of(25)
    half.mkdir()
    code, out, _ = pliant("list", "mine", "--json")
    rows = {row["step"]: row for row in json.loads(out)}
    assert code == 0
    assert {step: row["why"] for step, row in rows.items()} == {
        25: "left by a dead attempt",
        20: "the last",
        15: "older than what is kept",
        10: "eval_loss 1 is among the best",
        5: "older than what is kept",
    }
    assert (rows[10]["metrics"], rows[10]["world_size"]) == ({"eval_loss": 1.0}, 2)
    files = (run_dir / "checkpoints" / name_of(10)).glob("*.safetensors")
    assert rows[10]["size_bytes"] == sum(path.stat().st_size for path in files)
    with file_lock(run_dir / ".lock"):
        _, out, _ = pliant("list", "mine", "--json")
    assert json.loads(out)[0]["why"] == "being written"


def test_the_list_is_a_table_for_people(pliant, run_dir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (run_dir / "checkpoints" / name_of(5) / "manifest.json").write_text("{")
    code, out, _ = pliant("list", "mine")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 5)
    assert lines[0].split() == ["step", "attempt", "workers", "size", "age", "metrics", "why"]
    assert lines[1].split()[:3] == ["20", "1", "2"]
    assert lines[1].split()[-4:] == ["eval_loss", "2.5", "the", "last"]
    assert lines[4].split()[:5] == ["5", "1", "?", "?", "?"]


def test_what_is_whole_is_verified(pliant, run_dir):
    code, out, _ = pliant("verify", "mine")
    assert code == 0
    assert out.splitlines() == [f"{name_of(step)}: whole" for step in (20, 15, 10, 5)]


def test_damage_is_named_and_is_a_negative_verdict(pliant, run_dir):
    altered = run_dir / "checkpoints" / name_of(10) / "rank-00001.safetensors"
    altered.write_bytes(altered.read_bytes()[:-1] + b"\7")
    (run_dir / "checkpoints" / name_of(15) / "rank-00000.safetensors").unlink()
    (run_dir / "checkpoints" / name_of(15) / "rank-00001.safetensors").unlink()
    code, out, complaint = pliant("verify", "mine")
    assert code == 5
    assert out.splitlines()[1:3] == [f"{name_of(15)}: damaged", f"{name_of(10)}: damaged"]
    assert complaint.count("is missing") == 2
    assert f"{altered} was altered" in complaint
    assert pliant("verify", "mine", "--step", "20")[0] == 0
    code, out, _ = pliant("verify", "mine", "--step", "15", "--json")
    (found,) = json.loads(out)
    assert (code, found["name"], len(found["damage"])) == (5, name_of(15), 2)


def test_pruning_follows_the_spec(pliant, run_dir):
    code, out, _ = pliant("prune", "mine", "--dry-run")
    assert (code, out.splitlines()[-1], left(run_dir)) == (0, "2 would go", [5, 10, 15, 20])
    code, out, _ = pliant("prune", "mine")
    assert (code, out.splitlines()[-1], left(run_dir)) == (0, "2 removed", [10, 20])
    assert f"{name_of(15)}: older than what is kept" in out


def test_pruning_leaves_the_last_one_that_is_whole(pliant, run_dir):
    for step in (10, 15, 20):
        (run_dir / "checkpoints" / name_of(step) / "rank-00000.safetensors").write_bytes(b"")
    assert pliant("prune", "mine")[0] == 0
    assert left(run_dir) == [5, 10, 20]
    (run_dir / "checkpoints" / name_of(5) / "rank-00000.safetensors").write_bytes(b"")
    code, _, complaint = pliant("prune", "mine")
    assert (code, left(run_dir)) == (3, [5, 10, 20])
    assert "None of the 3 checkpoints" in complaint


def test_a_running_job_is_not_pruned(pliant, run_dir):
    with file_lock(run_dir / ".lock"):
        code, _, complaint = pliant("prune", "mine")
    assert (code, left(run_dir)) == (2, [5, 10, 15, 20])
    assert "mine is running" in complaint


@pytest.mark.parametrize("command", ["list", "verify", "prune", "export"])
def test_a_run_that_is_not_there_is_named(pliant, command):
    code, _, complaint = pliant(command, "yours")
    assert code == 2
    assert "There is no run yours" in complaint


def test_a_step_that_is_not_there_is_named(pliant, run_dir):
    for command in ("verify", "export"):
        code, _, complaint = pliant(command, "mine", "--step", "7")
        assert code == 2
        assert "no checkpoint of step 7. Steps that are there: 5, 10, 15, 20." in complaint


def test_a_run_keeps_its_checkpoints_where_its_spec_says(pliant, tmp_path):
    spec = tiny_spec({"checkpoint": {"storage": str(tmp_path / "shared")}})
    write_run(tmp_path / "mine", spec)
    assert "holds no checkpoints yet" in pliant("list", "mine")[1]
    places = places_of(tmp_path / "mine", spec.checkpoint.storage)
    commit(places.checkpoints, places.ledger, 5)
    assert (tmp_path / "shared" / "mine" / "checkpoints" / name_of(5)).is_dir()
    assert pliant("verify", "mine")[:2] == (0, f"{name_of(5)}: whole\n")


def test_a_step_is_exported(pliant, tmp_path):
    write_run(tmp_path / "mine", tiny_spec({"training": {"precision": "bf16"}}))
    for step in (5, 10):
        save_model(tmp_path / "mine", trained_model(tiny_spec(), seed=step), step)
    code, out, _ = pliant("export", "mine", "--step", "5", "--max-shard-size", "40KB")
    directory = tmp_path / "mine" / "export" / "step-00000005"
    assert (code, out.startswith(f"step 5 is in {directory}, ")) == (0, True)
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    weights = trained_model(tiny_spec(), seed=5)
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in weights.parameters())
    assert json.loads((directory / "config.json").read_bytes())["dtype"] == "bfloat16"
    code, out, _ = pliant("export", "mine", "--to", str(tmp_path / "out"), "--dtype", "fp32")
    assert (code, out.startswith("step 10 is in")) == (0, True)
    code, _, complaint = pliant("export", "mine", "--to", str(tmp_path / "out"))
    assert (code, "exists already" in complaint) == (2, True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("200kb", 200_000),
        ("77", 77),
        ("2 g", 2 * 10**9),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0MB", "many"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="Give a size"):
        parse_size(text)
