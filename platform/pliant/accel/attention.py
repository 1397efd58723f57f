"""Attention over packed rows in which no segment sees another.

Registered in transformers under the name `pliant_packed`, so that every model that goes through its
attention registry uses it unchanged. The segments travel as the keyword `packed` of the model's
call. Whatever this function does not implement it refuses: a boundary that is ignored would train a
wrong model without a sign.

Shapes: B rows, T tokens, H heads, K key/value heads, D channels of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pliant.batch import PackedMetadata
from pliant.errors import ModelError

PACKED = "pliant_packed"

_HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal"}
"""Keywords that models pass along and that do not change what attention computes here."""


@dataclass(frozen=True)
class Window:
    """Stands in the place of a mask in which tokens see no further than `num_tokens`; some models
    say so nowhere else."""

    num_tokens: int


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | Window | None,
    *,
    packed: PackedMetadata | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment; the output is [B, T, H, D].

    Raises `ModelError` where the segments are missing or the model asks for more than this.
    """
    windows = [sliding_window] if sliding_window is not None else []
    if isinstance(attention_mask, Window):
        windows.append(attention_mask.num_tokens)
        attention_mask = None
    _refuse_what_is_not_implemented(module, packed, attention_mask, windows, kwargs)
    assert packed is not None
    groups, left = divmod(query_BHTD.shape[1], key_BKTD.shape[1])
    if left:
        raise ModelError(
            f"{type(module).__name__} has {query_BHTD.shape[1]} attention heads, which cannot "
            f"share {key_BKTD.shape[1]} key/value heads evenly. Use a divisor of their number."
        )
    if groups > 1:
        key_BKTD = key_BKTD.repeat_interleave(groups, dim=1)
        value_BKTD = value_BKTD.repeat_interleave(groups, dim=1)
    rows = [
        _attend_row(
            query_BHTD[b], key_BKTD[b], value_BKTD[b], list(packed.segments[b]), dropout, scaling
        )
        for b in range(query_BHTD.shape[0])
    ]
    return torch.stack(rows).transpose(1, 2), None


def _attend_row(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    lengths: list[int],
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    parts = zip(
        torch.split(query_HTD, lengths, dim=1),
        torch.split(key_HTD, lengths, dim=1),
        torch.split(value_HTD, lengths, dim=1),
        strict=True,
    )
    # The leading dimension of one is what lets the CPU use its flash kernel.
    attended = [
        F.scaled_dot_product_attention(
            query[None], key[None], value[None], dropout_p=dropout, is_causal=True, scale=scaling
        )[0]
        for query, key, value in parts
    ]
    return torch.cat(attended, dim=1)


def _refuse_what_is_not_implemented(
    module: torch.nn.Module,
    packed: PackedMetadata | None,
    attention_mask: torch.Tensor | None,
    windows: list[int],
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if packed is None:
        raise ModelError(
            f"{name} did not hand on the segments of the batch, so its samples would see each "
            "other. Use a model that passes keywords to its attention, or data.packing: false "
            "with seq_len at the longest sample and a model of your own.",
            module=name,
        )
    if attention_mask is not None:
        raise ModelError(f"{name} got an attention mask beside the segments; call it without one.")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{name} is not causal: its tokens see those after them, which packed attention does "
            "not let them. Use a causal model, or set is_decoder: true in its config.",
            module=name,
        )
    unknown = [k for k, v in others.items() if k not in _HARMLESS and v is not None]
    if unknown:
        raise ModelError(
            f"{name} asks its attention for {', '.join(sorted(unknown))}, which packed attention "
            "does not implement. Use another model.",
            module=name,
            keywords=unknown,
        )
    if windows and max(packed.lengths) > min(windows):
        raise ModelError(
            f"{name} has a window of {min(windows)} tokens and a segment has "
            f"{max(packed.lengths)}; packed attention has no windows. Set data.seq_len to "
            f"{min(windows)} or less.",
            module=name,
        )


def _mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Window | None:
    """The mask function that belongs to `packed_attention`: the segments are the mask.

    `local_size` is how far a sliding window or a chunk reaches; `use_vmap` says that the model
    brought a mask of its own.
    """
    if attention_mask is not None:
        raise ModelError("A padding mask was given to a model with packed attention; drop it.")
    if use_vmap:
        raise ModelError(
            "The model adds a mask of its own to the causal one, which packed attention does not "
            "implement. Use another model."
        )
    return None if local_size is None else Window(local_size)


@contextmanager
def registered() -> Iterator[None]:
    """Makes `pliant_packed` known to transformers; the registries are restored on leaving."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mappings = [
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
    ]
    before = [dict(mapping) for mapping in mappings]
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _mask)
    try:
        yield
    finally:
        for mapping, original in zip(mappings, before, strict=True):
            mapping.clear()
            mapping.update(original)
