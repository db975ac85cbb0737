"""A child process of vLLM ends when its host ends, even during its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from pdmesh.engine.vllm.child.startup import guarded_children

HOST = """
import multiprocessing, time
from pdmesh.engine.vllm.child.startup import guarded_children
with guarded_children():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_when_its_host_is_killed() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    child = int(host.stdout.readline())
    with host.stdout:
        assert _is_alive(child)
        host.send_signal(signal.SIGKILL)
        host.wait()
    deadline = time.monotonic() + 20
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(child)


def test_the_main_module_is_restored_afterwards() -> None:
    main = sys.modules["__main__"]
    before = (main.__spec__, main.__dict__.get("__file__"))
    with guarded_children():
        assert main.__spec__ is None
        assert str(main.__file__).endswith("child_main.py")
    assert (main.__spec__, main.__dict__.get("__file__")) == before


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return os.name != "posix"
