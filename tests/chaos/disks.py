"""Disks of a few megabytes that can be full, or take no writes, without harm to anybody else.

They are tmpfs, mounted in a mount namespace that only this process and those it starts are in; it
vanishes with them. Linux lets most users make one (`unshare --user --mount`); where it does not,
the run goes without, and leaves out the faults that need them.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INSIDE = "PLIANT_CHAOS_DISKS"
"""Set in the environment of a process that may mount."""
BUSY_S = 20.0


def enter_namespace(arguments: Sequence[str]) -> bool:
    """Starts this program anew where it may mount disks, in place of this process; whether it may
    mount in this one."""
    if INSIDE in os.environ:
        return os.environ[INSIDE] == "1"
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *as_root, "--mount"]
    try:
        probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        may = subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        may = False
    os.environ[INSIDE] = "1" if may else "0"
    if may:
        os.execvp(unshare[0], [*unshare, sys.executable, "-m", "chaos", *arguments])
    return False


@dataclass
class Disk:
    """One that is mounted on a folder."""

    folder: Path
    size_bytes: int

    @property
    def _filler(self) -> Path:
        return self.folder / ".filler"

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        size = f"size={self.size_bytes},mode=700"
        _run("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.folder))

    def unmount(self) -> None:
        _run("umount", "--lazy", str(self.folder))

    def fill(self) -> None:
        """Takes every free page."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
        try:
            taken = 0
            while free := self._free_bytes():
                try:
                    os.posix_fallocate(descriptor, taken, free)
                    taken += free
                except OSError as error:  # somebody was quicker
                    if error.errno != errno.ENOSPC:
                        raise
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def lock(self) -> None:
        """Nothing can be written until it is unlocked. Waits until no file is open for that."""
        end = time.monotonic() + BUSY_S
        while True:
            try:
                return _run("mount", "-o", "remount,ro", str(self.folder))
            except subprocess.CalledProcessError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def unlock(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.folder))

    def _free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
