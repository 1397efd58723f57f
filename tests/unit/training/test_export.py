"""What is exported is, to transformers and PEFT, the model that was trained."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fakes.jobs import TINY_LLAMA, tiny_spec
from fakes.runs import VOCAB, save_model, trained_model
from pliant.checkpoints.reader import newest
from pliant.data.tokenizer import save_tokenizer, train_tokenizer
from pliant.errors import CheckpointMismatch, ModelError, UserError
from pliant.training.export import Run, Tensor, export_adapter, export_model, plan_shards

FP32 = torch.float32
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": VOCAB,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def of(config, **model):
    spec = tiny_spec({"model": {"config": None, "factory": "none.such", **model}})
    changes = {"config": config, "factory": None}
    return spec.model_copy(update={"model": spec.model.model_copy(update=changes)})


def saved(root, model, **changes):
    save_model(root, model, 7, **changes)
    return newest(root / "checkpoints", root / "ledger")


def logits(model):
    """With plain attention: that of training is for packed rows."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    bare.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def load(directory):
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=FP32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize(
    "config",
    [
        TINY_LLAMA,
        {**TINY_LLAMA, "tie_word_embeddings": True},
        {**GPT2, "vocab_size": VOCAB},
        MIXTRAL,
    ],
    ids=["llama", "tied", "gpt2", "mixtral"],
)
def test_transformers_computes_the_same_with_what_was_exported(tmp_path, config):
    spec = of(config)
    model = trained_model(spec)
    checkpoint = saved(tmp_path, model)
    export_model(Run(spec, VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == [type(model).__name__]
    assert (written["use_cache"], written["dtype"]) == (True, "float32")
    assert "pliant" not in (tmp_path / "out" / "config.json").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_a_large_model_is_written_in_shards_of_another_type(tmp_path):
    spec = tiny_spec()
    model = trained_model(spec)
    checkpoint = saved(tmp_path, model)
    export_model(Run(spec, VOCAB, None), checkpoint, tmp_path / "out", torch.bfloat16, 20_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    assert all(path.stat().st_size < 22_000 for path in shards)
    found = dict(load(tmp_path / "out").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.to(torch.bfloat16).float()), name


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A tiny llama on disk, and a job that trained adapters on it."""
    root = tmp_path_factory.mktemp("adapted")
    base = trained_model(tiny_spec(), seed=5)
    base.save_pretrained(root / "base")
    generation = root / "base" / "generation_config.json"
    generation.write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    spec = tiny_spec({"model": {"config": None, "path": str(root / "base"), "lora": {"r": 4}}})
    model = trained_model(spec)
    return spec, saved(root, model), logits(model), root


def test_adapters_are_merged_into_the_weights_they_were_trained_on(adapted, tmp_path):
    spec, checkpoint, expected, root = adapted
    export_model(Run(spec, VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(logits(load(root / "base")), expected, atol=1e-2)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.5


def test_adapters_alone_are_read_by_peft(adapted, tmp_path):
    from peft import PeftModel

    spec, checkpoint, expected, root = adapted
    export_adapter(Run(spec, VOCAB, None), checkpoint, tmp_path / "out", FP32)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(root / "base")
    model = PeftModel.from_pretrained(load(root / "base"), tmp_path / "out")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert all(".default" not in name for name in file.keys())  # noqa: SIM118


def test_other_frozen_weights_are_refused(adapted, tmp_path):
    spec, checkpoint, _, _ = adapted
    trained_model(tiny_spec(), seed=6).save_pretrained(tmp_path / "base")
    moved = spec.model_copy(
        update={"model": spec.model.model_copy(update={"path": str(tmp_path / "base")})}
    )
    with pytest.raises(CheckpointMismatch, match="frozen weights are not those"):
        export_model(Run(moved, VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoint = saved(tmp_path, trained_model(tiny_spec()))
    other = tiny_spec({"model": {"config": {**TINY_LLAMA, "num_hidden_layers": 1}}})
    with pytest.raises(CheckpointMismatch, match=r"model.layers.1.\S+, which this model has not"):
        export_model(Run(other, VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_of_transformers_is_refused(tmp_path):
    spec = tiny_spec({"model": {"config": None, "factory": "fakes.own_code.average_so_far"}})
    checkpoint = saved(tmp_path, trained_model(spec))
    with pytest.raises(ModelError, match=r"AverageSoFar of your own"):
        export_model(Run(spec, VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)


def test_there_are_no_adapters_of_a_model_that_was_trained_whole(tmp_path):
    checkpoint = saved(tmp_path, trained_model(tiny_spec()))
    with pytest.raises(UserError, match="trained no adapters"):
        export_adapter(Run(tiny_spec(), VOCAB, None), checkpoint, tmp_path / "out", FP32)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path):
    checkpoint = saved(tmp_path, trained_model(tiny_spec()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists already"):
        export_model(Run(tiny_spec(), VOCAB, None), checkpoint, tmp_path / "out", FP32, 10**9)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_the_tokenizer_goes_along_and_ends_what_is_generated(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(["some text", "more text"], 300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    checkpoint = saved(tmp_path, trained_model(tiny_spec()))
    run = Run(tiny_spec(), VOCAB, tmp_path / "tokenizer", tokenizer.eos_id, tokenizer.pad_id)
    export_model(run, checkpoint, tmp_path / "out", FP32, 10**9)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("more text")["input_ids"] == tokenizer.encode_batch(["more text"])[0]
    generation = load(tmp_path / "out").generation_config
    assert (generation.eos_token_id, generation.bos_token_id) == (tokenizer.eos_id, None)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20), max_bytes=st.integers(4, 200))
def test_shards_keep_the_order_and_the_limit(sizes, max_bytes):
    tensors = [Tensor(str(n), (size,), FP32) for n, size in enumerate(sizes)]
    shards = plan_shards(tensors, max_bytes)
    assert [tensor for shard in shards for tensor in shard] == tensors
    for shard in shards:
        assert len(shard) == 1 or sum(t.size_bytes for t in shard) <= max_bytes
    for shard, later in pairwise(shards):
        assert sum(t.size_bytes for t in shard) + later[0].size_bytes > max_bytes
