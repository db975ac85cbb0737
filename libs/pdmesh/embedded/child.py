"""Starts a child process that, on Linux, cannot outlive its parent.

The child runs in its own session. So Ctrl-C reaches only the launcher, which stops its children in
order. The child begins as a small Python program, which asks the kernel to kill the child when the
parent dies, even by SIGKILL. It then executes the real program. A `preexec_fn` could ask the kernel
as well. But it would run in a fork of a process that may have threads, and could deadlock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

# The 1 is PR_SET_PDEATHSIG. If the parent died before the call, getppid() returns another pid.
_SHIM: Final = """
import os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
try:
    os.execvpe(program[0], program, os.environ)
except OSError as exc:
    sys.exit(f"cannot run {program[0]}: {exc.strerror}")
"""


def start(
    command: Sequence[str], env: Mapping[str, str], log_file: Path, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Run `command` with its output appended to `log_file`. Call this on the main thread only.

    The kernel kills the child as soon as the *thread* that started it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children must be started from the main thread")
    # Only this user may read the log, because it names requests and tenants.
    handle = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
        )


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a child and all processes of its process group. Do nothing if they are gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
