"""A run goes on only from a checkpoint of the same model, data and batches."""

import json
from dataclasses import replace

import pytest

from fakes.checkpoints import a_manifest
from fakes.jobs import TINY_LLAMA, tiny_spec
from pliant.checkpoints.reader import Checkpoint
from pliant.elastic.resume import check_identity, job_identity
from pliant.errors import CheckpointMismatch
from pliant.storage.opening import open_storage

FROZEN = "00000000000000ab"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of the tiny job, as it is after a trip to the disk."""
    identity = json.loads(json.dumps(job_identity(tiny_spec(), "key")))
    return Checkpoint(
        open_storage(tmp_path), "step", a_manifest(identity=identity, frozen_digest=FROZEN)
    )


def check(saved, changes=None, data_key="key", frozen=FROZEN):
    check_identity(saved, job_identity(tiny_spec(changes), data_key), frozen)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deepspeed": {"zero_stage": 3}},
        {"training": {"lr": 0.5, "steps": 99, "precision": "bf16", "weight_decay": 0.3}},
        {"elastic": {"max_workers": 7}},
        {"name": "another"},
    ],
)
def test_what_may_change_is_not_looked_at(saved, changes):
    check(saved, changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training": {"global_batch_size": 6}}, "training.global_batch_size was 5 and is now 6"),
        ({"training": {"micro_batch_size": 5}}, "training.micro_batch_size was 1 and is now 5"),
        ({"training": {"seed": 8}}, "training.seed was 0 and is now 8"),
        ({"data": {"seq_len": 32}}, "data.seq_len was 16 and is now 32"),
        ({"data": {"window": 7}}, "data.window was 1000 and is now 7"),
        ({"data": {"packing": False}}, "data.packing was True and is now False"),
        (
            {
                "model": {
                    "config": {**TINY_LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1}
                }
            },
            "model.config.num_attention_heads was 4 and is now 2",
        ),
        (
            {"model": {"config": {**TINY_LLAMA, "rope_theta": 7.0}}},
            "model.config.rope_theta was None and is now 7.0",
        ),
        ({"model": {"lora": {"r": 4}}}, "model.lora.r was None and is now 4"),
    ],
)
def test_what_must_not_change_is_named_with_both_values(saved, changes, sentence):
    with pytest.raises(CheckpointMismatch) as caught:
        check(saved, changes)
    assert sentence in str(caught.value)
    assert str(saved.directory) in str(caught.value)
    assert "give the job another name" in str(caught.value)
    assert sentence.startswith(caught.value.key)


def test_a_setting_that_was_taken_out_is_named(saved):
    before = {**saved.manifest.identity, "model.config.rope_theta": 7.0}
    older = replace(saved, manifest=replace(saved.manifest, identity=before))
    with pytest.raises(CheckpointMismatch, match=r"rope_theta was 7.0 and is now None"):
        check(older)


def test_other_adapters_on_the_same_model_are_refused(tmp_path):
    spec = tiny_spec({"model": {"lora": {"r": 4, "alpha": 8}}})
    saved = Checkpoint(
        open_storage(tmp_path), "step", a_manifest(identity=job_identity(spec, "key"))
    )
    changed = tiny_spec({"model": {"lora": {"r": 4, "alpha": 16}}})
    with pytest.raises(CheckpointMismatch, match=r"model.lora.alpha was 8.0 and is now 16.0"):
        check_identity(saved, job_identity(changed, "key"), saved.manifest.frozen_digest)


def test_a_model_may_move(tmp_path):
    spec = tiny_spec({"model": {"config": None, "path": "here"}})
    saved = Checkpoint(
        open_storage(tmp_path), "step", a_manifest(identity=job_identity(spec, "key"))
    )
    moved = tiny_spec({"model": {"config": None, "path": "there"}})
    check_identity(saved, job_identity(moved, "key"), saved.manifest.frozen_digest)


def test_other_data_is_not_explained_by_its_key(saved):
    with pytest.raises(CheckpointMismatch, match="The training data or how it is tokenized"):
        check(saved, data_key="another")


def test_other_frozen_weights_are_refused(saved):
    with pytest.raises(CheckpointMismatch, match="The frozen weights are not those"):
        check(saved, frozen="0" * 16)
