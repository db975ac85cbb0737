"""The state of processes, from the kernel."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process is alive. A zombie is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped every thread. On a busy machine, some threads stop late."""
    stats = [thread / "stat" for thread in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.read_text().rsplit(")", 1)[1].split()[0] == "T" for stat in stats)
