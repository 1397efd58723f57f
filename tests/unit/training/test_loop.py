"""The loop: what was counted, what callbacks see, and when it stops."""

from dataclasses import dataclass, field

from fakes.own_code import LowestLoss
from pliant.batch import StepBatch
from pliant.spec.dotted import load_dotted
from pliant.training.engine import StepResult
from pliant.training.loop import train
from pliant.training.progress import Progress


@dataclass
class FakeEngine:
    """Loses as told; ranks vote at the steps in `votes`."""

    losses: list[float]
    votes: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[int, bool]] = field(default_factory=list)

    def step(self, batch, step, vote):
        self.calls.append((step, vote))
        return StepResult(self.losses[step], 0.1, 1.0, self.votes.get(step, int(vote)), 0.01)


@dataclass
class Stop:
    """Set from a step on."""

    engine: FakeEngine
    after: int

    def is_set(self):
        return len(self.engine.calls) >= self.after


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


NEVER = 10**9


def test_progress_counts_steps_samples_tokens_and_the_place_in_the_data():
    engine = FakeEngine([4.0, 3.0, 2.0])
    found = train(engine, batches(3), [], Progress(), Stop(engine, NEVER))
    assert found == Progress(step=3, epoch=1, pack=3, samples=33, tokens=300)
    assert engine.calls == [(0, False), (1, False), (2, False)]


def test_a_resumed_run_goes_on_counting():
    engine = FakeEngine([0.0] * 9)
    begun = Progress(step=5, epoch=0, pack=3, samples=50, tokens=500)
    found = train(engine, batches(2), [], begun, Stop(engine, NEVER))
    assert [step for step, _ in engine.calls] == [5, 6]
    assert found == Progress(step=7, epoch=0, pack=6, samples=71, tokens=700)
    assert begun.step == 5


def test_callbacks_see_every_step_in_order_once_it_is_counted():
    engine, first, second = FakeEngine([4.0, 3.0]), Remember(), Remember()
    train(engine, batches(2), [first, second], Progress(), Stop(engine, NEVER))
    assert [(p.step, pack, loss) for p, pack, loss in first.seen] == [(1, 3, 4.0), (2, 6, 3.0)]
    assert second.seen == first.seen


def test_a_rank_that_is_asked_to_stop_votes_and_stops_after_that_step():
    engine, watch = FakeEngine([1.0] * 5), Remember()
    found = train(engine, batches(5), [watch], Progress(), Stop(engine, 2))
    assert engine.calls == [(0, False), (1, False), (2, True)]
    assert found.step == 3
    assert len(watch.seen) == 3, "the last step is seen by callbacks as well"


def test_the_vote_of_another_rank_stops_this_one_after_the_same_step():
    engine = FakeEngine([1.0] * 5, votes={1: 1})
    found = train(engine, batches(5), [], Progress(), Stop(engine, NEVER))
    assert found.step == 2
    assert not any(vote for _, vote in engine.calls)


def test_no_batch_is_taken_that_is_not_run():
    engine = FakeEngine([1.0] * 5, votes={1: 3})
    stream = batches(5)
    train(engine, stream, [], Progress(), Stop(engine, NEVER))
    assert next(stream).num_samples == 12


def test_without_batches_nothing_happens():
    engine = FakeEngine([])
    begun = Progress(step=7)
    assert train(engine, [], [Remember()], begun, Stop(engine, 0)) is begun


def test_a_callback_of_the_users_own_is_named_by_its_dotted_path():
    callback = load_dotted("fakes.own_code.LowestLoss", "training.callbacks")()
    assert isinstance(callback, LowestLoss)
    engine = FakeEngine([4.0, 2.0, 3.0])
    train(engine, batches(3), [callback], Progress(), Stop(engine, NEVER))
    assert (callback.step, callback.loss) == (2, 2.0)
