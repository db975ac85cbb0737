"""Makes the kernel allocate the pool's pages before their first use.

The first touch of a page costs several times as much as a copy into it, and that copy is part of an
engine's step. So a thread asks the kernel for the pages, piece by piece, without changing them. A
kernel that cannot do this allocates each page at its first use.
"""

from __future__ import annotations

import threading
from typing import Final

from pdmesh.kv.agent.arena_memory import HostArena

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not among Python's constants
_PIECE_BYTES: Final = 4 << 20  # one piece holds the interpreter for about a millisecond


class PopulatedArena(HostArena):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._is_closed = threading.Event()
        threading.Thread(target=self._populate, name="kv-pool-pages", daemon=True).start()

    def _populate(self) -> None:
        for start in range(0, self.size, _PIECE_BYTES):
            if self._is_closed.wait(0):
                return
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_PIECE_BYTES, self.size - start))
            except OSError:  # an older kernel, or no memory left
                return

    def close(self) -> None:
        self._is_closed.set()
        super().close()
