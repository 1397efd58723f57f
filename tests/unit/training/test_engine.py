"""A step of the engine is a step of plain torch on the unpacked samples, whatever the number of
ranks, the ZeRO stage and the way in which the batch was cut.

The measuring is done by `fakes.measure`, in one process group for each number of ranks.
"""

import math

import pytest
import torch

from fakes import measure, skips
from fakes.ranks import run_ranks
from pliant.errors import RanksDisagree, TrainingDiverged, TrainingRewinds
from pliant.training.engine import parameter_groups, seed_micro_batch

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, 3]


@pytest.fixture(scope="module")
def measured():
    """For each number of ranks, what rank 0 measured; the others must have seen the same."""
    results = {}
    for world_size in WORLDS:
        ranks = run_ranks(measure.engine, world_size)
        for other in ranks[1:]:
            assert other["curves"] == ranks[0]["curves"]
            assert str(other["disagreement"]) == str(ranks[0]["disagreement"])
            assert str(other["skips"]) == str(ranks[0]["skips"])
        results[world_size] = ranks[0]
    return results


@pytest.mark.parametrize("variant", list(measure.CURVES))
def test_losses_do_not_depend_on_the_number_of_ranks(measured, variant):
    tolerance = 5e-3 if "bf16" in variant else 1e-5
    curves = [measured[world_size]["curves"][variant] for world_size in WORLDS]
    assert len(curves[0]) == measure.STEPS
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=tolerance)


@pytest.mark.parametrize("world_size", WORLDS)
def test_losses_do_not_depend_on_the_stage(measured, world_size):
    curves = measured[world_size]["curves"]
    for variant, curve in curves.items():
        if "bf16" not in variant:
            assert curve == pytest.approx(curves["stage 0"], rel=1e-5), variant


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", [*STAGES, "round robin"])
def test_the_first_step_is_that_of_plain_torch_on_the_unpacked_samples(measured, world_size, stage):
    expected = measured[1]["plain"]
    step = measured[world_size]["first_step"][stage]
    assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert expected["grad_norm"] > measure.CLIP, "the gradient must be clipped for this test"
    assert step["state"].keys() == expected["state"].keys()
    for key, tensor in expected["state"].items():
        torch.testing.assert_close(step["state"][key], tensor, rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_is_the_loss_over_all_targets_and_trains_nothing(measured, world_size, stage):
    step = measured[world_size]["first_step"][stage]
    assert step["evaluation"] == pytest.approx(measured[1]["plain"]["evaluation"], rel=1e-5)
    assert step["evaluation_again"] == step["evaluation"]
    assert step["evaluation_of_nothing"] == 0.0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_without_targets_has_the_loss_0_and_breaks_nothing(measured, world_size, stage):
    empty = measured[world_size]["first_step"][stage]["empty"]
    assert empty["loss"] == 0.0
    assert empty["grad_norm"] == 0.0
    assert empty["weights_are_finite"]
    assert math.isfinite(empty["next_loss"])


@pytest.mark.parametrize("world_size", WORLDS)
def test_votes_of_the_ranks_are_added_up(measured, world_size):
    assert measured[world_size]["votes"] == [0, 1, world_size, 2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_holds_something_else_is_named_to_all(measured, world_size):
    error = measured[world_size]["disagreement"]
    assert isinstance(error, RanksDisagree)
    assert error.ranks == [world_size - 1]
    assert f"The last words of rank {world_size - 1} differ" in str(error)


def test_a_single_rank_agrees_with_itself(measured):
    assert measured[1]["disagreement"] is None


@pytest.mark.parametrize("stage", STAGES)
def test_the_learning_rate_reaches_the_optimizer(measured, stage):
    step = measured[2]["first_step"][stage]
    assert step["lr"] == pytest.approx(measure.LR / 2), "half way through the warm-up"
    assert step["group_lrs"] == [step["lr"]] * 2
    assert step["group_decays"] == [0.1, 0.0]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("variant", ["loss", "gradient"])
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_that_are_not_finite_end_the_training(measured, world_size, variant, stage):
    error = measured[world_size]["diverged"][variant, stage]
    assert isinstance(error, TrainingDiverged)
    assert error.step == 1
    assert "step 1" in str(error)


@pytest.mark.parametrize("variant", list(skips.SKIPS))
def test_a_step_that_is_left_out_changes_nothing(measured, variant):
    """Neither for itself nor for the steps after it, which a leftover gradient would do."""
    found = measured[2]["skips"][variant]
    assert found["skipped"] == [True, True, True, False]
    before, *after = found["states"]
    assert after == [before] * 3
    assert before[2] == 1, "optimizer steps"
    assert found["final"] == found["expected"] != before


@pytest.mark.parametrize("variant", list(skips.SKIPS))
def test_a_step_that_is_left_out_says_why(measured, variant):
    of_loss, of_gradient, withheld, none = measured[2]["skips"][variant]["reasons"]
    assert of_loss == "The loss of step 2 is nan."
    assert "The gradient of step 3 has " in of_gradient
    assert withheld == "Training went back to leave out the update of step 4."
    assert none == ""


def test_a_fault_that_is_gone_back_behind_names_the_step(measured):
    error = measured[2]["skips"]["policies"]["rewind"]
    assert isinstance(error, TrainingRewinds)
    assert error.step == 1
    assert "Training goes back to the last checkpoint" in str(error)


@pytest.mark.parametrize(
    ("policy", "step", "sentence"),
    [
        ("too many skips", 2, "left out in a row before it: 1; training.max_skips allows 1."),
        ("too many rewinds", 1, "left out in a row before it: 0; training.max_skips allows 0."),
    ],
)
def test_more_faults_in_a_row_than_are_allowed_end_the_training(measured, policy, step, sentence):
    error = measured[2]["skips"]["policies"][policy]
    assert isinstance(error, TrainingDiverged)
    assert error.step == step
    assert sentence in str(error)


@pytest.mark.parametrize("variant", ["spike", "spike, exact"])
def test_a_loss_that_leaps_up_is_left_out(measured, variant):
    reasons = measured[2]["skips"]["policies"][variant]
    assert [bool(reason) for reason in reasons] == [False] * 4 + [True, False]
    assert "The loss of step 5 is " in reasons[4]
    assert "a spike: the last 4 have the median" in reasons[4]


def test_gradients_that_int64_cannot_hold_are_told(measured):
    (reason,) = measured[2]["skips"]["policies"]["too large"]
    assert "has elements of 838,861 or more, which training.exact cannot add up" in reason


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_loss_of_the_users_own_is_what_is_trained_and_shown(measured, world_size):
    own = measured[world_size]["own_loss"]
    assert own == pytest.approx(2 * measured[1]["curves"]["stage 1"][0], rel=1e-5)


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[2].weight.requires_grad = False
    decaying, others = parameter_groups(model, 0.3)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert [p is model[0].weight for p in decaying["params"]] == [True]
    assert {id(p) for p in others["params"]} == {
        id(p) for p in [model[0].bias, *model[1].parameters(), model[2].bias]
    }


def test_a_model_of_matrices_only_has_one_group():
    (group,) = parameter_groups(torch.nn.Linear(3, 4, bias=False), 0.3)
    assert group["weight_decay"] == 0.3


def test_dropout_follows_from_seed_step_and_micro_batch():
    drawn = set()
    for arguments in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11)]:
        seed_micro_batch(*arguments)
        first = torch.rand(1).item()
        seed_micro_batch(*arguments)
        assert torch.rand(1).item() == first
        drawn.add(first)
    assert len(drawn) == 6
