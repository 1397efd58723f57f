"""A committer without Ray: rank 0 hosts it, and the others reach it through a socket."""

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch.distributed as dist

from pliant.checkpoints.manifest import Manifest
from pliant.checkpoints.places import places_of
from pliant.checkpoints.retention import Policy, prune
from pliant.training.commit import Answer, Commits, Committer, RankSaved


def hosted_commits(run_dir: Path, keep: int = 5) -> tuple[Commits, list[dict[str, Any]]]:
    """How each rank reaches a committer of its own group; all ranks call it. The events that it
    tells are in the list, on rank 0."""
    events: list[dict[str, Any]] = []
    address: list[Any] = [None]
    if dist.get_rank() == 0:
        places = places_of(run_dir, None)

        def remove_old(newest: Manifest) -> None:
            prune(places.checkpoints, Policy(last=keep))

        committer = Committer(places, remove_old, events.append)
        listener = Listener(f"{mkdtemp(prefix='pl-')}/commits", family="AF_UNIX")
        address = [listener.address]
        threading.Thread(target=_serve, args=(listener, committer), daemon=True).start()
    dist.broadcast_object_list(address, src=0)
    return _reach(address[0]), events


def _serve(listener: Listener, committer: Committer) -> None:
    def answer(connection: Any) -> None:
        with connection, suppress(EOFError):
            connection.send(committer.rank_saved(connection.recv()))

    while True:
        connection = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def _reach(address: str) -> Callable[[RankSaved], Answer]:
    def rank_saved(report: RankSaved) -> Answer:
        with Client(address, family="AF_UNIX") as connection:
            connection.send(report)
            return connection.recv()  # type: ignore[no-any-return]

    return rank_saved
