"""What counts as a fault, and what follows from it: values in, a decision out."""

import math

import pytest

from fakes.jobs import tiny_spec
from pliant.training.divergence import History, decide, deviation, fault_of_loss

STEADY = (3.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.1, 2.9)


def settings(**changes):
    return tiny_spec({"training": {"spike_factor": 10, "spike_window": 8, **changes}}).training


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_fault_from_the_first_step_on(loss):
    assert fault_of_loss(settings(spike_factor=0), History(), loss) == f"is {loss}"


@pytest.mark.parametrize(
    ("loss", "is_spike"), [(3.0, False), (3.999, False), (4.001, True), (-50.0, False)]
)
def test_a_loss_far_above_the_last_ones_is_a_spike(loss, is_spike):
    """The median is 3, and deviations from it have the median 0.1."""
    fault = fault_of_loss(settings(), History(STEADY), loss)
    assert (fault is not None) == is_spike


def test_a_spike_is_told_with_what_it_was_measured_by():
    assert fault_of_loss(settings(), History(STEADY), 9.0) == (
        "is 9, a spike: the last 8 have the median 3, and training.spike_factor 10 allows up to 4"
    )


def test_no_spike_is_seen_before_the_window_is_full():
    assert fault_of_loss(settings(), History(STEADY[:-1]), 1e6) is None


def test_by_default_no_spikes_are_looked_for():
    defaults = tiny_spec().training
    history = History((3.0,) * defaults.spike_window)
    assert fault_of_loss(defaults, history, 1e6) is None


def test_one_spike_does_not_hide_the_next():
    history = History((*STEADY[:-1], 1000.0))
    assert fault_of_loss(settings(), history, 9.0) is not None


def test_losses_that_do_not_move_make_no_spike_of_a_ripple():
    history = History((2.0,) * 8)
    assert deviation(history.losses) == pytest.approx(0.02)
    assert fault_of_loss(settings(), history, 2.19) is None
    assert fault_of_loss(settings(), history, 2.21) is not None


def test_losses_that_fall_fast_are_no_spikes():
    history = History()
    for step in range(40):
        loss = 10 * 0.8**step
        assert fault_of_loss(settings(), history, loss) is None
        history = history.after(loss, False, 8)


def test_history_keeps_the_last_losses_that_were_applied():
    history = History()
    for loss in range(10):
        history = history.after(float(loss), skipped=loss in (7, 8), window=3)
    assert history == History((5.0, 6.0, 9.0), skips=0)


def test_history_counts_skips_in_a_row():
    history = History(STEADY)
    for _ in range(3):
        history = history.after(math.nan, skipped=True, window=8)
    assert history == History(STEADY, skips=3)


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_the_policy_decides(policy):
    assert decide(settings(on_divergence=policy), History()) == policy


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize(("skips", "goes_on"), [(0, True), (2, True), (3, False), (9, False)])
def test_too_many_skips_in_a_row_end_the_job(policy, skips, goes_on):
    action = decide(settings(on_divergence=policy, max_skips=3), History(skips=skips))
    assert action == (policy if goes_on else "stop")


def test_by_default_training_stops():
    assert decide(tiny_spec().training, History()) == "stop"
