"""A running Ray for the driver: an embedded one, or the cluster at an address."""

import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from pliant.errors import ClusterError

NAMESPACE = "pliant"


@contextmanager
def ray_session(address: str | None, num_cpus: int, verbose: bool = False) -> Iterator[None]:
    """Connects to `address`, or starts a Ray of our own with at least `num_cpus` logical CPUs.

    An embedded Ray listens on the loopback only and has no dashboard. Raises `ClusterError`.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # After a shutdown, a late thread of Ray Data must not start another Ray by itself.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    level = logging.INFO if verbose else logging.ERROR
    if address is not None:
        _reach(address)
    try:
        if address is None:
            _start(num_cpus, level, verbose)
        else:
            ray.init(
                address=address, namespace=NAMESPACE, logging_level=level, log_to_driver=verbose
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = address or "this machine"
        raise ClusterError(f"Ray cannot be reached at {where}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Ray itself would try for a minute and then tell of timeouts."""
    place = address.removeprefix("ray://")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", or a form that Ray knows best
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"No Ray cluster answers at {address}: {error}. Start one with `ray start --head`, "
            "or check the address.",
            address=address,
        ) from None


def _start(num_cpus: int, level: int, verbose: bool) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    with _other_process_group():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level=level,
            log_to_driver=verbose,
            _node_ip_address="127.0.0.1",
        )


@contextmanager
def _other_process_group() -> Iterator[None]:
    """Processes started within are in a process group of their own: a signal to the driver's group,
    from a terminal or `timeout`, reaches the driver alone, which then stops the job in order."""
    own = os.getpgrp()
    holder = subprocess.Popen(["sleep", "300"], process_group=0)
    try:
        with suppress(OSError):  # the leader of a session cannot leave its group
            os.setpgid(0, holder.pid)
        yield
    finally:
        if os.getpgrp() != own:
            os.setpgid(0, own)
        holder.kill()
        holder.wait()
