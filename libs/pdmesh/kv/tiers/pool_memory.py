"""Makes the kernel allocate the pages of a host pool before their first use.

The first write to a page costs several times as much as later writes, and the engine's step would
have to wait for it. Therefore a thread asks the kernel for the pages in advance, piece by piece.
The pages' contents stay the same. A kernel that does not support this allocates each page at its
first use.
"""

from __future__ import annotations

import threading
from typing import Final

from pdmesh.kv.agent.arena_memory import HostArena

_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; Python's `mmap` lacks this constant
_PIECE_BYTES: Final = 4 << 20  # a piece blocks the interpreter for about a millisecond


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
