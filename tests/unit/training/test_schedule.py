"""The learning rate of each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.jobs import tiny_spec
from pliant.training.schedule import learning_rate


def rates(steps, **training):
    spec = tiny_spec({"training": {"steps": steps, "lr": 1.0, **training}}).training
    return [learning_rate(spec, step) for step in range(steps)]


def test_constant_stays():
    assert rates(3, schedule="constant") == [1.0] * 3


def test_warmup_grows_evenly_to_the_full_rate_and_never_starts_at_0():
    assert rates(5, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_evenly_towards_its_end():
    assert rates(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_linear_falls_after_the_warmup():
    found = rates(6, schedule="linear", warmup_steps=2, min_lr_ratio=0)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(8, schedule="cosine", min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.55)
    assert found[2] + found[6] == pytest.approx(1.1)
    assert found == sorted(found, reverse=True)


def test_a_warmup_longer_than_the_run_goes_on_to_its_end():
    assert rates(2, schedule="cosine", warmup_steps=4) == [0.25, 0.5]


@given(
    steps=st.integers(1, 30),
    warmup=st.integers(0, 40),
    ratio=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    beyond=st.integers(0, 10),
)
def test_a_rate_is_never_above_lr_nor_below_its_end(steps, warmup, ratio, schedule, beyond):
    training = {"steps": steps, "lr": 1.0, "warmup_steps": warmup, "min_lr_ratio": ratio}
    spec = tiny_spec({"training": {**training, "schedule": schedule}}).training
    for step in range(warmup, steps + beyond):
        assert ratio - 1e-12 <= learning_rate(spec, step) <= 1.0
