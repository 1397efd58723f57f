"""In exact mode everything is the same to the bit, whatever the number of ranks: five micro-batches
to a step, which no number of ranks but one divides, with dropout and clipping."""

import math

import pytest
import torch

from fakes import exact_runs
from fakes.exact_runs import WORLDS
from fakes.jobs import tiny_spec
from fakes.ranks import run_ranks
from pliant.errors import SpecError
from pliant.training.deepspeed_config import deepspeed_config


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """For each number of ranks, what each of them measured."""
    ranks = run_ranks(exact_runs.everything, max(WORLDS), tmp_path_factory.mktemp("runs"))
    return {
        world_size: [ranks[rank][world_size] for rank in range(world_size)] for world_size in WORLDS
    }


@pytest.mark.parametrize("variant", list(exact_runs.VARIANTS))
@pytest.mark.parametrize("what", ["digest", "losses", "norms", "evaluation"])
def test_nothing_depends_on_the_number_of_ranks(measured, variant, what):
    found = [rank[variant][what] for ranks in measured.values() for rank in ranks]
    assert len(found) == sum(WORLDS)
    assert all(value == found[0] for value in found)


def test_weights_differ_where_gradients_are_added_as_floats(measured):
    """Else the test above would show little."""
    digests = {ranks[0][exact_runs.PLAIN]["digest"] for ranks in measured.values()}
    assert len(digests) > 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_do_not_depend_on_the_stage(measured, precision):
    of_stage = {measured[3][0][f"{precision}, stage {stage}"]["digest"] for stage in range(3)}
    assert len(of_stage) == 1


def test_the_gradient_was_clipped(measured):
    for variant, spec in exact_runs.VARIANTS.items():
        assert min(measured[1][0][variant]["norms"]) > spec.training.clip_norm


def test_it_is_the_training_that_it_is_without(measured):
    exact, plain = (measured[1][0][name] for name in ("fp32, stage 1", exact_runs.PLAIN))
    for what in ("losses", "norms", "evaluation"):
        assert exact[what] == pytest.approx(plain[what], rel=1e-5)


def test_votes_are_added_up(measured):
    assert measured[3][0]["fp32, stage 1"]["votes"] == [3 * step for step in range(8)]


@pytest.mark.parametrize("variant", exact_runs.RESUMED)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_run_that_two_ranks_saved_ends_as_if_nothing_had_happened(measured, variant, world_size):
    undisturbed = measured[2][0][variant]["digest"]
    assert measured[world_size][0]["resumed"][variant] == undisturbed


@pytest.mark.parametrize("world_size", WORLDS)
def test_fixed_point_adds_up_over_ranks(measured, world_size):
    for rank in measured[world_size]:
        found = rank["fixed point"]
        votes = sum(range(world_size))
        assert found["plain"] == [0.5 * world_size, votes, False, False]
        unit, times = 2.0**-40, 2 * world_size
        assert found["short"] == [-times * unit, 0.0, 3 * times * unit]


@pytest.mark.parametrize("world_size", WORLDS)
def test_fixed_point_copies_parts_across_chunks(measured, world_size):
    ranks = [rank["fixed point"] for rank in measured[world_size]]
    whole = sum(2 * rank["added"].double() for rank in ranks)
    expected = (0.5 * whole[-5:]).float()
    torch.testing.assert_close(ranks[0]["long"], expected, rtol=1e-6, atol=1e-10)
    norm = math.sqrt(whole.square().sum().item() + (3.0 * world_size) ** 2)
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fixed_point_tells_all_ranks_what_one_of_them_could_not_add(measured, world_size):
    for rank in measured[world_size]:
        found = rank["fixed point"]
        assert found["nan"] == [True, False]
        assert found["steep"] == [False, True]
        assert found["almost"] == [False, False]
        assert math.isnan(found["bad loss"])
        assert math.isnan(found["huge loss"])


def test_deepspeed_does_not_clip_what_is_clipped_already():
    for stage in range(3):
        spec = tiny_spec({"training": {"exact": True}, "deepspeed": {"zero_stage": stage}})
        assert spec.training.clip_norm == 1.0
        assert deepspeed_config(spec)["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training": {"precision": "fp16"}}, "Use bf16 or fp32"),
        ({"deepspeed": {"zero_stage": 3}}, "Use zero_stage 0, 1 or 2"),
    ],
)
def test_what_cannot_be_exact_is_refused(changes, sentence):
    training = {"exact": True, **changes.get("training", {})}
    with pytest.raises(SpecError, match=sentence):
        tiny_spec({**changes, "training": training})
