"""The digests of a tensor's parts add up to the same whatever cut it, and to no other's."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.checkpoints import NUMELS, a_manifest, cut, whole_tensors
from pliant.checkpoints.digests import (
    NUM_LARGE,
    added,
    check,
    chosen,
    expected,
    partial_digest,
    partial_digests,
    stated,
)
from pliant.errors import FilesDamaged


@settings(deadline=None)
@given(
    edges=st.lists(st.integers(0, 60), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_the_parts_add_up_however_they_are_cut(edges, dtype):
    whole = (whole_tensors()["fp32/weight"].abs() * 9).to(dtype)
    edges = [0, *sorted(edges), 60]
    parts = [partial_digest(whole[a:b], a) for a, b in pairwise(edges)]
    before = whole.clone()
    assert sum(parts) % 2**64 == partial_digest(whole)
    assert torch.equal(whole, before), "a digest leaves what it digests alone"


def test_a_digest_is_the_same_in_every_version():
    """Checkpoints hold them."""
    assert partial_digest(torch.arange(5.0), 3) == 0x01B54A6BB1CFF01F


def test_parts_that_trade_places_do_not_add_up():
    whole = whole_tensors()["fp32/weight"]
    swapped = partial_digest(whole[30:], 0) + partial_digest(whole[:30], 30)
    assert swapped % 2**64 != partial_digest(whole)


def test_a_single_bit_counts():
    whole = whole_tensors()["fp32/weight"]
    before = partial_digest(whole)
    whole.view(torch.int32)[59] ^= 1
    assert partial_digest(whole) != before


def digests_of(tensors, num_ranks, keys=NUMELS.keys()):
    return added(partial_digests(rank, keys) for rank in cut(tensors, num_ranks))


def test_another_number_of_ranks_finds_what_was_saved():
    saved = a_manifest(digests=stated(digests_of(whole_tensors(), 3)))
    assert expected(saved, "fp32/bias") == partial_digest(whole_tensors()["fp32/bias"])
    assert expected(saved, "fp32/head") is None
    for num_ranks in (1, 2, 4):
        check(saved, digests_of(whole_tensors(), num_ranks))


def test_a_tensor_that_was_put_together_wrongly_is_named():
    saved = a_manifest(step=7, digests=stated(digests_of(whole_tensors(), 3)))
    tensors = whole_tensors()
    tensors["exp_avg/weight"][10:20] = tensors["exp_avg/weight"][20:30].clone()
    with pytest.raises(FilesDamaged, match=r"exp_avg/weight .* step 7") as caught:
        check(saved, digests_of(tensors, 2))
    assert caught.value.key == "exp_avg/weight"


def test_what_was_not_saved_with_a_digest_is_not_compared():
    check(a_manifest(), digests_of(whole_tensors(), 2))


def test_a_part_that_several_ranks_hold_counts_once():
    from dataclasses import replace

    (everything,) = cut(whole_tensors(), 1)
    copy = [replace(fragment, is_owner=False) for fragment in everything]
    ranks = [partial_digests(part, NUMELS.keys()) for part in (everything, copy)]
    assert added(ranks) == digests_of(whole_tensors(), 1)


def test_all_small_tensors_and_some_large_ones_are_chosen_anew_each_time():
    tensors = {f"fp32/layer-{n}": 10**6 for n in range(40)} | {"fp32/norm": 64}
    first, again, other = (chosen(tensors, seed) for seed in (10, 10, 20))
    assert first == again != other
    assert len(first) == NUM_LARGE + 1
    assert "fp32/norm" in first & other
    assert chosen({"fp32/norm": 64}, 1) == {"fp32/norm"}
