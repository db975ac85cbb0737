"""`pdmesh down`: stops the mesh that was started with this state directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

from pdmesh.cli.errors import CommandFailed
from pdmesh.launcher import state

_POLL_S: Final = 0.05


def run(options: argparse.Namespace) -> int:
    pid = state.locker_pid(options.state_dir)
    if pid is None and state.is_locked(options.state_dir):
        raise CommandFailed(f"an unknown process holds {options.state_dir / 'lock'}")
    if pid is None:
        if state.forget_run(options.state_dir):
            print("no mesh is running here; the files of the last one are removed")
        else:
            print("no mesh is running here")
        return 0
    began = time.monotonic()
    _signal(pid, signal.SIGTERM)
    if not _is_gone(options.state_dir, options.timeout):
        _signal(pid, signal.SIGKILL)  # the launcher's children die with it
        if not _is_gone(options.state_dir, options.timeout):
            raise CommandFailed(f"the launcher (pid {pid}) did not stop")
        print(f"the mesh did not stop in {options.timeout:g} s and was killed")
        return 1
    print(f"the mesh is down ({time.monotonic() - began:.1f} s)")
    return 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_gone(state_dir: Path, timeout_s: float) -> bool:
    """Whether the launcher has released its lock, which it holds until it exits."""
    deadline = time.monotonic() + timeout_s
    while state.is_locked(state_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
