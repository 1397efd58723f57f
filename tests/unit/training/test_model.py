"""Models from a config, a directory and a user's own code; what is refused, and why."""

import json

import pytest
import torch

from fakes import own_code
from fakes.jobs import TINY_LLAMA, tiny_spec
from pliant.accel.attention import registered
from pliant.batch import PackedMetadata
from pliant.errors import ModelError, SpecError
from pliant.training.model import build_model, count_beforehand, count_parameters, forward

V = 64


@pytest.fixture(autouse=True)
def pliant_packed():
    with registered():
        yield


def build(model, vocab_size=V, **training):
    return build_model(spec_of(model, **training), vocab_size)


def spec_of(model, **training):
    return tiny_spec({"model": {"config": None, **model}, "training": training})


def llama(**changes):
    return {"config": {**TINY_LLAMA, **changes}}


def own(name, **args):
    return {"factory": f"fakes.own_code.{name}", "factory_args": args}


def logits(model):
    packed = PackedMetadata(((9, 7),))
    tokens_BT = torch.arange(16)[None]
    return forward(model.eval(), tokens_BT, packed.positions_BT(), packed)


def same_weights(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == twin and torch.equal(a, b) for (name, a), (twin, b) in pairs)


@pytest.fixture
def saved(tmp_path):
    """A tiny llama as a local Hugging Face directory."""
    build(llama(), seed=3).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_config_gives_a_model_in_fp32_with_random_weights():
    model = build(llama())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert logits(model).shape == (1, 16, V)
    assert model.config.use_cache is False


def test_weights_follow_from_the_seed():
    assert same_weights(build(llama(), seed=1), build(llama(), seed=1))
    assert not same_weights(build(llama(), seed=1), build(llama(), seed=2))
    lora = {**llama(), "lora": {"r": 4}}
    assert same_weights(build(lora, seed=1), build(lora, seed=1))


def test_the_spec_is_not_written_into():
    spec = spec_of(llama())
    before = json.dumps(spec.model_dump())
    build_model(spec, V)
    count_beforehand(spec, V)
    assert json.dumps(spec.model_dump()) == before


def test_a_config_as_it_is_published_is_taken():
    published = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
    }
    model = build(llama(**published))
    assert model.config.use_cache is False
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_directory_gives_the_weights_that_lie_there(saved):
    loaded = build({"path": str(saved)}, seed=8)
    original = build(llama(), seed=3)
    assert same_weights(loaded, original)
    assert torch.equal(logits(loaded), logits(original))
    assert loaded.config.use_cache is False


def test_weights_in_bf16_are_trained_in_fp32(saved):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).save_pretrained(saved)
    loaded = build({"path": str(saved)})
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_embeddings_for_fewer_tokens_than_the_tokenizer_has_are_refused(saved):
    with pytest.raises(ModelError, match=r"tokenizer has 65 tokens.*embeddings for 64"):
        build({"path": str(saved)}, vocab_size=65)
    build({"path": str(saved)}, vocab_size=63)


def test_a_factory_may_return_plain_logits():
    model = build(own("average_so_far", width=6))
    assert isinstance(model, own_code.AverageSoFar)
    assert model.embed.weight.shape == (V, 6)
    assert logits(model).shape == (1, 16, V)


def test_a_factory_that_ignores_the_segments_is_refused():
    with pytest.raises(ModelError, match="AverageSoFar mixes samples") as caught:
        build(own("average_over_boundaries"))
    assert caught.value.difference > 1e-2


def test_weights_of_a_factory_lie_in_memory_in_their_own_order():
    """Their state is saved as it lies there."""
    model = build(own("transposed_average"))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert torch.equal(model.seen, torch.arange(6.0).view(2, 3).t())


def test_a_factory_that_returns_no_module_is_refused():
    with pytest.raises(ModelError, match="no_model returned str"):
        build(own("no_model"))


def test_a_factory_that_is_not_there_is_named():
    with pytest.raises(SpecError, match="has no nothing"):
        build(own("nothing"))


def test_a_model_that_cannot_recompute_is_told_so():
    with pytest.raises(ModelError, match=r"activation_checkpointing.*AverageSoFar"):
        build(own("average_so_far"), activation_checkpointing=True)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit"},
        {**TINY_LLAMA, "hidden_size": "wide"},
        {**TINY_LLAMA, "num_attention_heads": 5},
        {**TINY_LLAMA, "num_attention_heads": 0},
        {**TINY_LLAMA, "hidden_act": "no-such-function"},
        {**TINY_LLAMA, "hidden_size": -32},
    ],
)
def test_a_config_that_describes_no_model_is_a_sentence(config):
    spec = spec_of({"config": {"vocab_size": V, **config}})
    for action in (build_model, count_beforehand):
        with pytest.raises(ModelError, match=r"model.config does not describe"):
            action(spec, V)


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [("lama", "Did you mean llama"), ("no-such-thing-at-all", "One that is: llama")],
)
def test_an_unknown_model_type_is_named_with_a_hint(model_type, hint):
    spec = spec_of({"config": {"vocab_size": V, "model_type": model_type}})
    with pytest.raises(ModelError, match=hint):
        build_model(spec, V)


def test_a_path_where_nothing_is_is_named(tmp_path):
    with pytest.raises(ModelError, match="nothing is there") as caught:
        build({"path": str(tmp_path / "llama")})
    assert caught.value.path == str(tmp_path / "llama")


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def of_no_text_model(folder):
    (folder / "config.json").write_text('{"model_type": "vit"}')


def broken_config(folder):
    (folder / "config.json").write_text("{")


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def other_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        of_no_text_model,
        broken_config,
        without_weights,
        truncated_weights,
        no_weights,
        other_sizes,
    ],
)
def test_a_directory_that_holds_no_whole_model_is_a_sentence(saved, damage):
    damage(saved)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        build({"path": str(saved)})


def test_weights_that_are_missing_do_not_start_at_random(saved):
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 of the model's weights, .*layers\.1\.mlp\.up_proj"
    ):
        build({"path": str(saved)})


def test_lora_trains_adapters_only(saved):
    model = build({"path": str(saved), "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}})
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert torch.equal(logits(model), logits(build({"path": str(saved)}))), "an adapter starts at 0"


def test_lora_gets_gradients_when_activations_are_recomputed():
    model = build({**llama(), "lora": {"r": 2}}, activation_checkpointing=True).train()
    packed = PackedMetadata(((16,),))
    forward(model, torch.arange(16)[None], packed.positions_BT(), packed).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None for gradient in gradients)
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


def test_lora_on_modules_that_are_not_there_is_a_sentence():
    with pytest.raises(ModelError, match=r"model.lora does not fit"):
        build({**llama(), "lora": {"target_modules": ["no_such_module"]}})


ORIGINS = {
    "config": llama(),
    "tied": llama(tie_word_embeddings=True),
    "lora": {**llama(), "lora": {"r": 4}},
    "mixtral": {
        "config": {**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 2},
    },
    "own": own("average_so_far"),
}


@pytest.mark.parametrize("name", list(ORIGINS))
def test_parameters_are_counted_beforehand(name):
    assert count_beforehand(spec_of(ORIGINS[name]), V) == count_parameters(build(ORIGINS[name]))


@pytest.mark.parametrize("lora", [None, {"r": 4}])
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_of_a_directory_are_counted_beforehand(tmp_path, is_tied, lora):
    build(llama(tie_word_embeddings=is_tied)).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "lora": lora}
    assert count_beforehand(spec_of(model), V) == count_parameters(build(model))


def test_tied_weights_stay_tied(tmp_path):
    build(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    for origin in (llama(tie_word_embeddings=True), {"path": str(tmp_path)}):
        model = build(origin)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_row_longer_than_the_learned_positions_is_refused() -> None:
    short = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 15}
    spec = tiny_spec({"model": {"config": {**short, "vocab_size": 64}}})
    with registered(), pytest.raises(ModelError, match="15 learned positions"):
        build_model(spec, 64)
