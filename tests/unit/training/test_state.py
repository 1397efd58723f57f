"""A run that is saved and restored is the run that was never disturbed: to the bit on as many
ranks, and to rounding on more, on fewer and at another ZeRO stage.

The runs are those of `fakes.restarts`: two ranks save every variant at step 3; processes of one,
two and three ranks go on from there, with weights of their own scrambled first.
"""

from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

from fakes import restarts
from fakes.engines import global_batch
from fakes.ranks import run_ranks
from fakes.restarts import MODELS, SAVED_STEP, VARIANTS, at_stage
from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.reader import committed
from pliant.errors import CheckpointMismatch, NoSpace
from pliant.training.progress import Progress

ACROSS = [
    ("full, stage 0", 1),
    ("full, stage 1", 3),
    ("full, stage 2", 0),
    ("full, stage 3", 2),
    ("lora, stage 1", 3),
    ("lora, stage 3", 0),
    ("tied, stage 3", 1),
    ("tied, stage 0", 3),
    ("bf16, stage 1", 3),
    ("bf16, stage 3", 0),
]
"""(saved, the stage at which it is loaded)."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(root):
    """What two ranks saved and measured."""
    return run_ranks(restarts.on_two_ranks, 2, root)


@pytest.fixture(scope="module")
def others(root, two):
    """Of one and of three ranks, each variant as it was saved and at other stages."""
    same = [(name, changes) for name, changes in VARIANTS.items()]
    jobs = same + [(name, at_stage(name, stage)) for name, stage in ACROSS]
    keys = [(name, None) for name in VARIANTS] + ACROSS
    return {
        world_size: dict(
            zip(keys, run_ranks(restarts.later_runs, world_size, root, jobs)[0], strict=True)
        )
        for world_size in (1, 3)
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def assert_loaded(found, saved):
    """Everything is there as it was saved."""
    assert_same(found["state"], saved["state"])
    assert_same(found["buffers"], saved["buffers"])
    assert found["progress"] == saved["progress"]
    assert found["steps"] == saved["steps"] == SAVED_STEP
    assert found["all_steps"] == [SAVED_STEP]
    assert found["decays"] == saved["decays"]


@pytest.mark.parametrize("name", list(VARIANTS))
def test_as_many_ranks_go_on_as_if_nothing_had_happened(two, name):
    saved, restored = two[0]["saved"][name], two[0]["restored"][name]
    assert_loaded(restored, saved)
    assert restored["losses"] == saved["losses"]
    assert_same(restored["final"], saved["final"])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_fewer_and_more_ranks_go_on_from_the_same_state(two, others, name, world_size):
    saved, restored = two[0]["saved"][name], others[world_size][name, None]
    assert_loaded(restored, saved)
    tolerance = 5e-3 if "bf16" in name else 1e-5
    assert restored["losses"] == pytest.approx(saved["losses"], rel=tolerance)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("name", "stage"), ACROSS)
def test_another_stage_goes_on_from_the_same_state(two, others, name, stage, world_size):
    saved, restored = two[0]["saved"][name], others[world_size][name, stage]
    assert_loaded(restored, saved)
    tolerance = 2e-2 if "bf16" in name else 1e-5
    assert restored["losses"] == pytest.approx(saved["losses"], rel=tolerance)


def test_the_state_is_not_that_of_the_start(two):
    """Else the tests above would show little."""
    for name, saved in two[0]["saved"].items():
        moments = [tensor for key, tensor in saved["state"].items() if key.startswith("exp_avg")]
        assert all(bool(tensor.any()) for tensor in moments), name
        weights = [key for key in saved["state"] if key.startswith("fp32")]
        assert not all(torch.equal(saved["state"][k], saved["final"][k]) for k in weights), name


def test_all_weights_are_saved_once(two):
    names = {
        name: {key.partition("/")[2] for key in two[0]["saved"][f"{name}, stage 3"]["state"]}
        for name in MODELS
    }
    assert "lm_head.weight" in names["full"]
    assert names["full"] - names["tied"] == {"lm_head.weight"}
    assert all("lora_" in name for name in names["lora"])


def test_every_group_keeps_its_own_decay(two):
    for name, saved in two[0]["saved"].items():
        assert saved["decays"] == ([0.01] if name.startswith("lora") else [0.01, 0.0])


def test_persistent_buffers_are_saved_and_others_are_not(two):
    buffers = two[0]["restored"]["own model, stage 1"]["buffers"]
    assert buffers.keys() == {"seen", "steps"}
    assert buffers["seen"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert buffers["steps"].item() == 1


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("wider", r"it has fp32/\S+ with [\d,]+ elements"),
        ("deeper", r"it has fp32/model.layers.2.\S+ nowhere"),
        ("shallower", r"it has \S+/model.layers.1.\S+, which this model has not"),
        ("fewer heads", "model.config.num_attention_heads was 4 and is now 2"),
        ("adapters", r"it has fp32/base_model\S+ nowhere"),
        ("batch size", "training.global_batch_size was 5 and is now 6"),
        ("seed", "training.seed was 0 and is now 1"),
        ("data", "The training data or how it is tokenized has changed"),
        ("frozen weights", "The frozen weights are not those"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_on_every_rank(two, what, sentence):
    messages = {str(rank["mismatches"][what]) for rank in two}
    assert len(messages) == 1
    error = two[0]["mismatches"][what]
    assert isinstance(error, CheckpointMismatch)
    assert error.key
    with pytest.raises(CheckpointMismatch, match=sentence):
        raise error


def test_a_checkpoint_of_the_same_job_is_not_refused(two):
    assert [rank["mismatches"]["nothing"] for rank in two] == [None, None]


def test_a_disk_that_is_full_for_one_rank_is_told_to_all(two):
    for rank in two:
        assert isinstance(rank["full_disk"]["error"], NoSpace)
        assert rank["full_disk"]["left"] == ["step-00000001.attempt-0.ranks-2"]


def test_a_damaged_checkpoint_is_gone_back_behind_and_forgotten(two):
    for rank in two:
        resumed, ledger, then, left = rank["damaged"]
        assert resumed == 2
        assert ledger == [(0, 1), (2, 2)]
        assert then == 3
        assert left == ["step-00000003.attempt-2.ranks-2"]


def test_the_manifest_says_what_was_saved(root, two):
    checkpoints = root / "full, stage 1" / "checkpoints"
    (name,) = committed(checkpoints)
    manifest = Manifest.read(checkpoints, name)
    assert (manifest.step, manifest.world_size, manifest.zero_stage) == (SAVED_STEP, 2, 1)
    assert Progress(**manifest.progress) == two[0]["saved"]["full, stage 1"]["progress"]
    assert [group["weight_decay"] for group in manifest.optimizer["groups"]] == [0.01, 0.0]
    state = two[0]["saved"]["full, stage 1"]["state"]
    assert manifest.tensors == {key: len(tensor) for key, tensor in state.items()}


def test_the_ledger_holds_the_pieces_of_all_ranks(root, two):
    checkpoints = root / "full, stage 1" / "checkpoints"
    (name,) = committed(checkpoints)
    (entry,) = Manifest.read(checkpoints, name).ledger
    assert (entry.first_step, entry.last_step) == (0, SAVED_STEP - 1)
    table = pq.read_table(root / "full, stage 1" / "ledger" / entry.file).to_pylist()
    for step in range(SAVED_STEP):
        recorded = [piece for row in table if row["step"] == step for piece in row["pieces"]]
        run = [piece for micro in global_batch(step) for piece in micro.piece_ids.tolist()]
        assert Counter(recorded) == Counter(run)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_goes_on_from_every_other(root, two, world_size):
    grid = [
        (f"{model}, stage {saved}", stage)
        for model in MODELS
        for saved in range(4)
        for stage in range(4)
    ]
    jobs = [(name, at_stage(name, stage)) for name, stage in grid]
    results = run_ranks(restarts.later_runs, world_size, root, jobs)[0]
    for (name, stage), restored in zip(grid, results, strict=True):
        saved = two[0]["saved"][name]
        assert_loaded(restored, saved)
        assert restored["losses"] == pytest.approx(saved["losses"], rel=1e-5), (name, stage)


GROWN = [*((f"{model}, stage {stage}", stage) for model in MODELS for stage in (0, 1, 2, 3))]
GROWN += [("full, stage 1", 3), ("full, stage 3", 0), ("lora, stage 2", 3), ("tied, stage 0", 1)]
"""(saved, the stage at which it is loaded)."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 3)])
def test_growth_and_shrinkage_past_the_saved_size_go_on_from_the_same_state(
    tmp_path, before, after
):
    names = sorted({name for name, _ in GROWN})
    saved = run_ranks(restarts.first_runs, before, tmp_path, names)[0]
    jobs = [(name, at_stage(name, stage)) for name, stage in GROWN]
    results = run_ranks(restarts.later_runs, after, tmp_path, jobs)
    for rank in results:
        for (name, stage), restored in zip(GROWN, rank, strict=True):
            assert_loaded(restored, saved[name])
            losses = pytest.approx(saved[name]["losses"], rel=1e-5)
            assert restored["losses"] == losses, (name, stage)
