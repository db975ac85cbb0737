"""The main module of vLLM's child processes. It ends a child whose parent or host is gone.

A spawned child imports its parent's main module first. With this module in that place, the child
skips the service's imports (2 s) and is guarded from its first moment. Without the guard, a
starting vLLM may wait minutes for a dead parent. The host is the instance's process, the ancestor
of all these children.
"""

from __future__ import annotations

import os
import threading
import time

HOST_PID = "PDMESH_VLLM_HOST_PID"  # the host's pid, set in the environment of all its descendants
POLL_S = 0.5


def _guard(host: int, parent: int) -> None:
    """End this process when its parent or the host is gone.

    This polls, because no portable call waits for the end of a process that is not a child. The
    host is watched as well, because the parent may die before this process has read the parent's
    pid.
    """
    while os.getppid() == parent and _is_alive(host):
        time.sleep(POLL_S)
    os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__mp_main__":
    threading.Thread(
        target=_guard,
        args=(int(os.environ[HOST_PID]), os.getppid()),
        name="pdmesh-parent-guard",
        daemon=True,
    ).start()
