"""A digest tells tensors apart that differ in a single bit, and is the same for equal ones.

How ranks compare theirs is tested in `test_engine`, where there are ranks.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.checkpoints import digests
from pliant.training.digests import digest

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8, torch.bool]


def words(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_tensors_have_equal_digests(dtype):
    tensor = (torch.randn(5, 7) * 100).to(dtype)
    first = digest([tensor, tensor[:2]])
    assert first == digest([tensor.clone(), tensor[:2].clone()])
    assert 0 <= first < 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_single_bit_counts(dtype):
    tensor = torch.arange(1, 8).to(dtype)
    raw = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
    seen = {digest([tensor])}
    bits = 8 * tensor.element_size()
    for place, bit in itertools.product(range(7), range(bits)):
        changed = tensor.clone()
        mask = torch.tensor(1 << bit if bit < bits - 1 else -(1 << bit), dtype=raw)
        changed.view(raw)[place] ^= mask
        seen.add(digest([changed]))
    assert len(seen) == 7 * bits + 1


@given(st.integers(0, 40), st.integers(0, 40))
def test_swapping_two_elements_shows(one, other):
    tensor = torch.arange(41.0)
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert (digest([tensor]) == digest([swapped])) == (one == other)


def test_swapping_two_tensors_shows():
    one, other = torch.ones(3), torch.zeros(3)
    assert digest([one, other]) != digest([other, one])
    assert digest([one]) != digest([one, torch.empty(0)])


def test_differences_do_not_cancel_out():
    """Sums of words weighted by their positions are equal for some of these."""
    pairs = list(itertools.product(range(-6, 7), repeat=3))
    assert len({digest([words(*pair)]) for pair in pairs}) == len(pairs)


def test_signs_of_zero_show_wherever_they_stand():
    for distance in (1, 64, 128, 256):
        tensor = torch.zeros(distance + 1, dtype=torch.float64)
        first, last = tensor.clone(), tensor.clone()
        first[0], last[-1] = -0.0, -0.0
        assert digest([first]) != digest([last])


def test_long_tensors_are_digested_in_parts(monkeypatch):
    tensor = torch.randn(1000)
    whole = digest([tensor])
    monkeypatch.setattr(digests, "_CHUNK", 77)
    assert digest([tensor]) == whole


def test_shapes_that_torch_gives_are_all_taken():
    tensor = torch.randn(3, 4)
    assert digest([tensor.t()]) == digest([tensor.t().contiguous()])
    assert digest([torch.tensor(1.0)]) == digest([torch.tensor([1.0])])
    assert digest([torch.nn.Parameter(tensor)]) == digest([tensor])
    assert digest([torch.tensor(torch.nan)]) == digest([torch.tensor(torch.nan)])
    assert digest([]) == 0
