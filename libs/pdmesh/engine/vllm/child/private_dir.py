"""Makes a private directory with a short path, for the sockets of an engine.

Directories of processes that have died are removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

# The owner's pid follows. Names are short: a socket's path may have only about 100 characters.
_PREFIX = "pdmesh-vllm-"


def make_private_dir(parent: Path | None = None) -> Path:
    """A new directory with mode 0700. Removes this user's directories whose process is gone."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or already removed
            if left.stat().st_uid == os.getuid() and not _is_owned(left):
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _is_owned(directory: Path) -> bool:
    pid = directory.name.removeprefix(_PREFIX).split("-")[0]
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
