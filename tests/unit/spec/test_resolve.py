"""What is left to "auto" is decided from facts; what was asked for stays."""

from dataclasses import replace
from typing import Any

import pytest

from fakes.jobs import tiny_spec
from pliant.errors import SpecError
from pliant.spec import load_spec
from pliant.spec.resolve import BLOCK_BYTES, BYTES_PER_TOKEN, Facts, flatten, resolve, unresolved

ALL = Facts(num_gpus=0, num_parameters=10_000_000, vocab_size=300, num_training_steps=10)
SWITCHES = ("enable_metadata_cache", "enable_double_buffer", "enable_grouped_index")


@pytest.fixture
def load(spec_file):
    return lambda *settings: load_spec(spec_file, environ={}, settings=settings)


def test_with_all_facts_only_the_data_is_left_to_be_looked_at(load):
    assert unresolved(resolve(load(), ALL)) == ["data.format", "data.shape", "data.overlong"]


def test_without_facts_what_they_decide_stays_auto(load):
    left = unresolved(resolve(load(), Facts()))
    assert "resources.device" in left
    assert "deepspeed.reduce_bucket_size" in left
    assert "data.block_steps" not in left


@pytest.mark.parametrize(
    ("shape", "overlong"),
    [("text", "split"), ("messages", "truncate"), ("prompt_completion", "truncate")],
)
def test_answers_are_never_parted_from_their_questions(load, shape, overlong):
    resolved = resolve(load(), replace(ALL, data_shape=shape, data_format="json"))
    assert resolved.data.overlong == overlong
    assert not unresolved(resolved)
    assert resolve(load("data.overlong=drop"), ALL).data.overlong == "drop"


def test_held_out_rows_are_packed_as_the_others_are(load):
    assert resolve(load(), ALL).data.eval_packing is True
    assert resolve(load("data.packing=false"), ALL).data.eval_packing is False
    assert resolve(load("data.eval_packing=false"), ALL).data.eval_packing is False


def test_facts_may_come_one_after_another(load):
    spec = load()
    for facts in (Facts(vocab_size=300), Facts(num_parameters=10_000_000), Facts(num_gpus=0)):
        spec = resolve(spec, facts)
    assert resolve(spec, Facts(num_training_steps=10)) == resolve(load(), ALL)


def test_resolving_again_changes_nothing(load):
    once = resolve(load(), ALL)
    assert resolve(once, ALL) == once


def test_resolving_does_not_touch_the_spec_it_was_given(load):
    spec = load("model.config.vocab_size=auto")
    before = spec.model_dump()
    resolve(spec, ALL)
    assert spec.model_dump() == before


EXPLICIT = {
    "data.block_steps": 3,
    "data.format": "json",
    "data.shape": "text",
    "deepspeed.reduce_bucket_size": 5,
    "deepspeed.allgather_bucket_size": 6,
    "deepspeed.stage3_prefetch_bucket_size": 7,
    "deepspeed.stage3_param_persistence_threshold": 0,
    "deepspeed.zero_stage": 2,
    "deepspeed.overlap_comm": True,
    "deepspeed.communication_data_type": "bf16",
    "resources.device": "cuda",
    "training.accelerator.enable_metadata_cache": False,
    "model.config.vocab_size": 512,
}


def test_what_was_asked_for_survives(load):
    asked = load(*(f"{key}={value}" for key, value in EXPLICIT.items()))
    found = flatten(resolve(asked, ALL).model_dump())
    assert {key: found[key] for key in EXPLICIT} == EXPLICIT
    assert not unresolved(resolve(asked, ALL))


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_optimisation_that_is_not_there_cannot_be_asked_for(load, switch):
    with pytest.raises(SpecError, match=f"{switch} is true") as caught:
        resolve(load(f"training.accelerator.{switch}=true"), Facts())
    assert caught.value.exit_code == 2
    assert caught.value.keys == [switch]


def test_auto_switches_are_off(load):
    settings = resolve(load(), Facts()).training.accelerator
    assert [getattr(settings, name) for name in SWITCHES] == [False] * 3


def test_the_device_goes_by_the_cluster(load):
    assert resolve(load(), Facts(num_gpus=8)).resources.device == "cuda"
    assert resolve(load(), Facts(num_gpus=0)).resources.device == "cpu"


@pytest.mark.parametrize("num_parameters", [0, 1, 10_000_000, 10**12])
def test_buckets_are_neither_empty_nor_endless(load, num_parameters):
    spec = resolve(load(), Facts(num_parameters=num_parameters)).deepspeed
    assert 1_000_000 <= spec.reduce_bucket_size <= 500_000_000
    assert spec.allgather_bucket_size == spec.reduce_bucket_size
    assert spec.stage3_prefetch_bucket_size == spec.reduce_bucket_size // 10


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 2), (8, 64), (1024, 32_768)])
def test_a_block_is_of_the_aimed_size_or_one_step(load, batch, seq_len):
    spec = load(f"training.global_batch_size={batch}", f"data.seq_len={seq_len}")
    steps = resolve(spec, Facts()).data.block_steps
    size = steps * batch * seq_len * BYTES_PER_TOKEN
    assert steps == 1 or size <= BLOCK_BYTES
    assert size + batch * seq_len * BYTES_PER_TOKEN > BLOCK_BYTES


def test_epochs_become_steps(load):
    spec = load("training.steps=null", "training.epochs=2")
    resolved = resolve(spec, Facts(num_training_steps=77)).training
    assert (resolved.steps, resolved.epochs) == (77, None)


@pytest.mark.parametrize("setting", ["model.config.hidden_size=32", "model.config.vocab_size=auto"])
def test_the_vocabulary_becomes_the_tokenizers(load, setting):
    assert resolve(load(setting), Facts(vocab_size=300)).model.config["vocab_size"] == 300
    assert "vocab_size" not in (resolve(load(), Facts()).model.config or {})


def test_a_vocabulary_of_none_becomes_the_tokenizers_too(load):
    spec = load("model.config.vocab_size=null")
    assert resolve(spec, Facts(vocab_size=300)).model.config["vocab_size"] == 300


@pytest.mark.parametrize("asked", ["299", "-1", "many", "true", "300.5"])
def test_a_vocabulary_that_cannot_hold_the_tokenizers_is_refused(load, asked):
    with pytest.raises(SpecError, match=r"model\.config\.vocab_size") as caught:
        resolve(load(f"model.config.vocab_size={asked}"), Facts(vocab_size=300))
    assert caught.value.exit_code == 2


def test_a_larger_vocabulary_may_be_written_as_text(load):
    spec = load("model.config.vocab_size='512'")
    assert resolve(spec, Facts(vocab_size=300)).model.config["vocab_size"] == 512


def test_a_model_without_a_config_has_no_vocabulary_to_set(load):
    spec = load("model.config=null", "model.path=somewhere")
    assert resolve(spec, ALL).model == spec.model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap_comm": True, "zero_stage": 1}, "overlap_comm needs zero_stage 2 or 3"),
        ({"offload_optimizer": "cpu", "zero_stage": 0}, "offload_optimizer needs"),
        ({"offload_param": "cpu", "zero_stage": 2}, "offload_param needs zero_stage 3"),
        ({"reduce_bucket_size": 0}, "holds at least one element"),
    ],
)
def test_what_deepspeed_would_crash_on_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        tiny_spec({"deepspeed": changes})
