"""Packed rows give the logits and gradients of their samples one by one, in the stock model; what
packed attention cannot do is refused.

Shapes: B rows, T tokens, V tokens in the vocabulary.
"""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pliant.accel.attention import PACKED, packed_attention, registered
from pliant.batch import PackedMetadata
from pliant.errors import ModelError
from pliant.training.model import check_segments_apart, forward

V = 64
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": V,
    "use_cache": False,
}
MODELS = {
    "llama": SMALL,
    "llama, all heads alike": {**SMALL, "num_key_value_heads": 4},
    "llama, one key-value head": {**SMALL, "num_key_value_heads": 1},
    "qwen3": {**SMALL, "head_dim": 16},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": V}
    | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2, scaled by layer": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": V}
    | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    | {"scale_attn_by_inverse_layer_idx": True},
}
SEGMENTS = ((5, 1, 6, 4), (9, 7))
"""Two rows of 16 tokens with different segments."""


@pytest.fixture(autouse=True)
def pliant_packed():
    with registered():
        yield


def build(model_type, fields, implementation=PACKED):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **copy.deepcopy(fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def build_named(name, implementation=PACKED):
    return build(name.split(",")[0], MODELS[name], implementation)


def some_tokens():
    return torch.randint(0, V, (2, 16), generator=torch.Generator().manual_seed(1))


def packed_logits(model, tokens_BT, segments=SEGMENTS):
    packed = PackedMetadata(segments)
    return forward(model, tokens_BT, packed.positions_BT(), packed)


def logits_one_by_one(model, tokens_BT):
    """In whatever attention the model comes with."""
    rows = [
        torch.cat([model(input_ids=part[None]).logits[0] for part in torch.split(row, lengths)])
        for row, lengths in zip(tokens_BT, SEGMENTS, strict=True)
    ]
    return torch.stack(rows)


def backward(logits_BTV):
    """From a loss that every logit has its own part in."""
    generator = torch.Generator().manual_seed(2)
    (logits_BTV * torch.randn(logits_BTV.shape, generator=generator)).sum().backward()


def assert_close(found, expected, what):
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale, msg=what)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_packed_rows_are_their_samples_one_by_one(name, recomputes):
    stock, packing = build_named(name, "eager"), build_named(name)
    packing.load_state_dict(stock.state_dict())
    packing.train(), stock.train()
    if recomputes:
        packing.gradient_checkpointing_enable({"use_reentrant": False})
    tokens_BT = some_tokens()
    found, expected = packed_logits(packing, tokens_BT), logits_one_by_one(stock, tokens_BT)
    assert_close(found, expected, "logits")
    backward(found), backward(expected)
    for (name, parameter), other in zip(
        packing.named_parameters(), stock.parameters(), strict=True
    ):
        assert_close(parameter.grad, other.grad, name)


def test_another_cut_of_the_rows_gives_other_logits():
    """The test above would otherwise pass with a model that does not look at the past."""
    model = build_named("llama")
    whole = packed_logits(model, some_tokens(), ((16,), (16,)))
    assert (whole - packed_logits(model, some_tokens())).abs().max() > 1e-3


def test_dropout_of_the_attention_acts_in_training_only():
    model = build("llama", {**SMALL, "attention_dropout": 0.5})
    tokens_BT = some_tokens()
    model.eval()
    assert torch.equal(packed_logits(model, tokens_BT), packed_logits(model, tokens_BT))
    model.train()
    assert not torch.equal(packed_logits(model, tokens_BT), packed_logits(model, tokens_BT))


def test_bf16_keeps_its_type():
    model = build_named("llama").bfloat16()
    assert packed_logits(model, some_tokens()).dtype == torch.bfloat16


def test_a_call_without_segments_is_refused():
    with pytest.raises(ModelError, match="LlamaAttention did not hand on the segments") as caught:
        build_named("llama")(input_ids=some_tokens())
    assert caught.value.module == "LlamaAttention"


@pytest.mark.parametrize("shape", [(2, 16), (2, 1, 16, 16)])
def test_an_attention_mask_is_refused(shape):
    packed = PackedMetadata(SEGMENTS)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ModelError, match="mask"):
        build_named("llama")(input_ids=some_tokens(), attention_mask=mask, packed=packed)


@pytest.mark.parametrize(
    ("model_type", "fields", "keyword"),
    [
        ("gemma2", {"head_dim": 8}, "softcap"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    ],
)
def test_what_packed_attention_does_not_implement_is_refused(model_type, fields, keyword):
    model = build(model_type, {**SMALL, **fields})
    with pytest.raises(ModelError, match=f"asks its attention for .*{keyword}") as caught:
        packed_logits(model, some_tokens())
    assert keyword in caught.value.keywords


WINDOWED = {
    "mistral": ("mistral", {**SMALL, "sliding_window": 8}),
    "qwen3": (
        "qwen3",
        {**SMALL, "head_dim": 8, "use_sliding_window": True, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "phimoe": (
        "phimoe",
        {**SMALL, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**SMALL, "use_sliding_window": True, "sliding_window": 8, "num_experts": 2}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "llama4_text": (
        "llama4_text",
        {**SMALL, "attention_chunk_size": 8, "intermediate_size_mlp": 64, "head_dim": 8}
        | {"num_local_experts": 2, "layer_types": ["chunked_attention"] * 2},
    ),
}


@pytest.mark.parametrize("name", list(WINDOWED))
def test_a_window_shorter_than_a_segment_is_refused(name):
    """Some models tell their attention of it, others only ask for such a mask."""
    model = build(*WINDOWED[name])
    with pytest.raises(ModelError, match="window of 8 tokens and a segment has 9"):
        packed_logits(model, some_tokens(), ((7, 9), (8, 8)))


@pytest.mark.parametrize("name", list(WINDOWED))
def test_a_window_no_shorter_than_any_segment_is_as_good_as_none(name):
    stock, packing = build(*WINDOWED[name], "eager"), build(*WINDOWED[name])
    packing.load_state_dict(stock.state_dict())
    packing.eval(), stock.eval()
    tokens_BT = some_tokens()
    found = packed_logits(packing, tokens_BT, ((8, 8), (3, 5, 8)))
    rows = [
        torch.cat([stock(input_ids=part[None]).logits[0] for part in torch.split(row, lengths)])
        for row, lengths in zip(tokens_BT, [(8, 8), (3, 5, 8)], strict=True)
    ]
    assert_close(found, torch.stack(rows), name)


def test_a_model_that_looks_ahead_is_refused():
    """BERT as a causal model is not told to be a decoder unless its config says so."""
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "vocab_size": V}
    with pytest.raises(ModelError, match="causal"):
        packed_logits(build("bert", fields), some_tokens())


def call_directly(segments=SEGMENTS, mask=None, module=None, **keywords):
    query = torch.randn(2, 4, 16, 8)
    key = torch.randn(2, 2, 16, 8)
    module = module or torch.nn.Identity()
    return packed_attention(
        module, query, key, key, mask, packed=PackedMetadata(segments), **keywords
    )


def test_keywords_that_change_nothing_are_let_through():
    output, weights = call_directly(position_ids=1, use_cache=False, is_causal=True, s_aux=None)
    assert output.shape == (2, 16, 4, 8)
    assert weights is None


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ModelError, match="causal"):
        call_directly(is_causal=False)
    encoder = torch.nn.Identity()
    encoder.is_causal = False
    with pytest.raises(ModelError, match="causal"):
        call_directly(module=encoder)


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(ModelError, match="4 attention heads, which cannot share 3"):
        packed_logits(build("llama", {**SMALL, "num_key_value_heads": 3}), some_tokens())


def test_a_mask_of_the_models_own_is_refused():
    from transformers.masking_utils import create_causal_mask

    model = build_named("llama")
    with pytest.raises(ModelError, match="mask of its own"):
        create_causal_mask(
            model.config,
            torch.zeros(2, 16, 32),
            attention_mask=None,
            past_key_values=None,
            or_mask_function=lambda batch, head, query, key: key < 3,
        )


def test_segments_that_do_not_fill_the_row_are_an_error():
    with pytest.raises(RuntimeError, match="split"):
        call_directly(segments=((5, 1, 6, 3), (9, 7)))


def test_state_that_leaks_over_a_boundary_is_noticed():
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": V, "state_size": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **fields))
    with pytest.raises(ModelError, match="MambaForCausalLM mixes samples") as caught:
        check_segments_apart(model, V)
    assert caught.value.difference > 0


@pytest.mark.parametrize("name", list(MODELS))
def test_models_that_keep_segments_apart_are_let_through(name):
    model = build_named(name).train()
    check_segments_apart(model, V)
    assert model.training


def registries():
    return [
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping),
    ]


class TestRegistries:
    """Of transformers, as they were before and after."""

    @pytest.fixture(autouse=True)
    def pliant_packed(self):
        """Nothing is registered here."""

    def test_they_are_restored(self):
        before = registries()
        assert all(PACKED not in mapping for mapping in before)
        with registered():
            assert all(PACKED in mapping for mapping in registries())
        assert registries() == before

    def test_they_are_restored_after_an_error(self):
        before = registries()
        with pytest.raises(KeyError), registered():
            raise KeyError
        assert registries() == before

    def test_they_are_restored_when_nested(self):
        before = registries()
        with registered():
            within = registries()
            with registered():
                pass
            assert registries() == within
        assert registries() == before

    def test_their_order_and_what_others_replaced_is_restored_as_well(self):
        mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
        order, eager = list(mapping), mapping["sdpa"]
        with registered():
            ALL_ATTENTION_FUNCTIONS.register("sdpa", packed_attention)
        assert list(mapping) == order
        assert mapping["sdpa"] is eager
