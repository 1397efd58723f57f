"""Ranks of which one is slow; run by `run_ranks`."""

import time

import torch.distributed as dist

from fakes.engines import engine_of, here, train_steps
from fakes.jobs import tiny_spec
from pliant.elastic.beats import Phase
from pliant.training.phases import Member, Phases, marked_collectives
from pliant.training.progress import Progress

SLEEP_S = 1.5


def steps_beside_a_sleeper(stage: int) -> tuple[int, dict[Phase, float]]:
    """Collectives entered, and the least seconds that this rank spent in each phase of four real
    steps, in which rank 1 sleeps before its forward pass."""
    place = here()
    phases = Phases(Member(1, place.rank, place.world_size, "n"))
    before = dist.all_reduce
    spec = tiny_spec({"deepspeed": {"zero_stage": stage}})
    with marked_collectives(phases, dist), engine_of(spec) as engine:
        progress = Progress()
        phases.resumed(0)
        for step in range(4):
            phases.enter("compute")
            time.sleep(SLEEP_S * place.rank)
            progress, _ = train_steps(engine, progress, step + 1)
            phases.step_done(step + 1)
    assert dist.all_reduce is before
    beat = phases.beat()
    phases_used: tuple[Phase, ...] = ("compute", "collective")
    return beat.collectives, {
        phase: min(step.seconds[phase] for step in beat.steps) for phase in phases_used
    }
