"""DeepSpeed gets plain values only, and of what a user adds only what pliant does not manage."""

import json

import pytest

from fakes.jobs import tiny_spec
from pliant.errors import SpecError
from pliant.spec.resolve import flatten
from pliant.training.deepspeed_config import (
    ALLOWED_EXTRA,
    ALLOWED_ZERO,
    check_extra,
    clips_by_itself,
    deepspeed_config,
)

STAGES = [0, 1, 2, 3]


def config(stage=1, **changes):
    section = {"zero_stage": stage, **changes.pop("deepspeed", {})}
    return deepspeed_config(tiny_spec({"deepspeed": section, **changes}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_to_deepspeed(stage, precision):
    made = config(stage, training={"precision": precision})
    assert "auto" not in flatten(made).values()
    assert "train_batch_size" not in made
    assert json.loads(json.dumps(made)) == made
    assert [made[kind]["enabled"] for kind in ("bf16", "fp16")] == [
        precision == "bf16",
        precision == "fp16",
    ]
    assert made["communication_data_type"] == precision


@pytest.mark.parametrize("stage", STAGES)
def test_pliant_accumulates_and_steps_itself(stage):
    made = config(stage, training={"global_batch_size": 12, "micro_batch_size": 3})
    assert made["train_micro_batch_size_per_gpu"] == 3
    assert made["gradient_accumulation_steps"] == 1
    assert made["managed_gradient_accumulation"] is False


@pytest.mark.parametrize("stage", STAGES)
def test_settings_of_stage_3_are_given_at_stage_3_only(stage):
    zero = config(stage)["zero_optimization"]
    assert zero["stage"] == stage
    only_3 = {"stage3_prefetch_bucket_size", "stage3_max_live_parameters", "sub_group_size"}
    assert only_3 & zero.keys() == (only_3 if stage == 3 else set())
    assert not {"offload_optimizer", "offload_param"} & zero.keys()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_is_passed_on(stage):
    what = ["offload_optimizer", "offload_param"] if stage == 3 else ["offload_optimizer"]
    zero = config(stage, deepspeed=dict.fromkeys(what, "cpu"))["zero_optimization"]
    assert [zero[key] for key in what] == [{"device": "cpu"}] * len(what)


def test_what_the_spec_says_arrives():
    settings = {
        "reduce_bucket_size": 12345,
        "allgather_bucket_size": 23456,
        "stage3_prefetch_bucket_size": 3,
        "stage3_max_live_parameters": 4,
        "stage3_max_reuse_distance": 5,
        "stage3_param_persistence_threshold": 6,
        "sub_group_size": 7,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "round_robin_gradients": True,
    }
    zero = config(3, deepspeed=settings)["zero_optimization"]
    assert {key: zero[key] for key in settings} == settings


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gradient_is_clipped_once(stage, precision):
    changes = {"training": {"precision": precision, "clip_norm": 0.7}}
    spec = tiny_spec({"deepspeed": {"zero_stage": stage}, **changes})
    clipped_by_deepspeed = config(stage, **changes)["gradient_clipping"]
    assert (clipped_by_deepspeed == 0.0) == clips_by_itself(spec)
    assert clips_by_itself(spec) == (stage == 0 and precision == "fp32")


def test_extra_keys_of_the_whitelist_are_passed_on():
    extra = {"wall_clock_breakdown": True, "zero_optimization": {"reduce_scatter": False}}
    made = config(2, deepspeed={"extra": extra})
    assert made["wall_clock_breakdown"] is True
    assert made["zero_optimization"]["reduce_scatter"] is False
    assert made["zero_optimization"]["stage"] == 2
    assert extra == {"wall_clock_breakdown": True, "zero_optimization": {"reduce_scatter": False}}


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"train_batch_size": 8}, "train_batch_size"),
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
        ({"zero_optimization": {"reduce_scater": True}}, "zero_optimization.reduce_scater"),
    ],
)
def test_extra_keys_that_pliant_manages_or_does_not_know_are_refused(extra, key):
    with pytest.raises(SpecError, match=f"deepspeed.extra has {key}, which") as caught:
        config(2, deepspeed={"extra": extra})
    assert caught.value.keys == [key]
    assert "Allowed: comms_logger" in str(caught.value)


@pytest.mark.parametrize("zero", [None, 3, [], "stage"])
def test_an_extra_section_that_is_none_is_refused(zero):
    with pytest.raises(SpecError, match=r"deepspeed.extra.zero_optimization is .*mapping"):
        check_extra({"zero_optimization": zero})


def test_the_whitelist_has_nothing_that_pliant_sets():
    made = config(3, deepspeed={"offload_optimizer": "cpu", "offload_param": "cpu"})
    assert ALLOWED_EXTRA & made.keys() == {"zero_optimization"}
    assert not ALLOWED_ZERO & made["zero_optimization"].keys()
