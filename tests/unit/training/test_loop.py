"""The loop: what was counted, what callbacks see, and when it stops."""

from dataclasses import dataclass, field

import pytest

from fakes.own_code import LowestLoss
from pliant.batch import StepBatch
from pliant.elastic.wish import Wish
from pliant.spec.dotted import load_dotted
from pliant.training.engine import StepResult
from pliant.training.loop import train
from pliant.training.progress import Progress


@dataclass
class FakeEngine:
    """Loses as told; ranks vote at the steps in `votes`."""

    losses: list[float]
    votes: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)

    def step(self, batch, step, vote):
        self.calls.append((step, vote))
        return StepResult(self.losses[step], 0.1, 1.0, self.votes.get(step, vote), 0.01)


def wishing(engine, wish, after):
    """A wish that is there once the engine has done so many steps."""
    return lambda: wish if len(engine.calls) >= after else Wish.NONE


def nothing():
    return Wish.NONE


class Remember:
    def __init__(self):
        self.seen = []

    def after_step(self, progress, batch, result):
        self.seen.append((progress, batch.end_pack, result.loss))


def batches(count, epoch_length=2):
    for step in range(count):
        epoch, place = divmod(step, epoch_length)
        yield StepBatch(
            micro_batches=(),
            num_targets=1,
            num_packs=3,
            num_samples=10 + step,
            num_tokens=100,
            epoch=epoch,
            end_pack=3 * (place + 1),
        )


def test_progress_counts_steps_samples_tokens_and_the_place_in_the_data():
    engine = FakeEngine([4.0, 3.0, 2.0])
    found, wish = train(engine, batches(3), [], Progress(), nothing)
    assert found == Progress(step=3, epoch=1, pack=3, samples=33, tokens=300)
    assert wish is Wish.NONE
    assert engine.calls == [(0, 0), (1, 0), (2, 0)]


def test_a_resumed_run_goes_on_counting():
    engine = FakeEngine([0.0] * 9)
    begun = Progress(step=5, epoch=0, pack=3, samples=50, tokens=500)
    found, _ = train(engine, batches(2), [], begun, nothing)
    assert [step for step, _ in engine.calls] == [5, 6]
    assert found == Progress(step=7, epoch=0, pack=6, samples=71, tokens=700)
    assert begun.step == 5


def test_callbacks_see_every_step_in_order_once_it_is_counted():
    engine, first, second = FakeEngine([4.0, 3.0]), Remember(), Remember()
    train(engine, batches(2), [first, second], Progress(), nothing)
    assert [(p.step, pack, loss) for p, pack, loss in first.seen] == [(1, 3, 4.0), (2, 6, 3.0)]
    assert second.seen == first.seen


@pytest.mark.parametrize("wish", [Wish.RESIZE, Wish.DRAIN, Wish.STOP])
def test_a_rank_that_something_is_wished_of_votes_and_ends_after_that_step(wish):
    engine, watch = FakeEngine([1.0] * 5), Remember()
    found, ended = train(engine, batches(5), [watch], Progress(), wishing(engine, wish, 2))
    assert engine.calls == [(0, 0), (1, 0), (2, int(wish))]
    assert (found.step, ended) == (3, wish)
    assert len(watch.seen) == 3, "the last step is seen by callbacks as well"


def test_the_vote_of_another_rank_stops_this_one_after_the_same_step():
    engine = FakeEngine([1.0] * 5, votes={1: 1})
    found, wish = train(engine, batches(5), [], Progress(), nothing)
    assert (found.step, wish) == (2, Wish.RESIZE)
    assert not any(vote for _, vote in engine.calls)


def test_no_batch_is_taken_that_is_not_run():
    engine = FakeEngine([1.0] * 5, votes={1: 3})
    stream = batches(5)
    train(engine, stream, [], Progress(), nothing)
    assert next(stream).num_samples == 12


def test_without_batches_nothing_happens():
    engine = FakeEngine([])
    begun = Progress(step=7)
    found, wish = train(engine, [], [Remember()], begun, wishing(engine, Wish.STOP, 0))
    assert found is begun
    assert wish is Wish.NONE


def test_a_callback_of_the_users_own_is_named_by_its_dotted_path():
    callback = load_dotted("fakes.own_code.LowestLoss", "training.callbacks")()
    assert isinstance(callback, LowestLoss)
    engine = FakeEngine([4.0, 2.0, 3.0])
    train(engine, batches(3), [callback], Progress(), nothing)
    assert (callback.step, callback.loss) == (2, 2.0)
