"""The loop that restores lost adapters survives its own bugs.

If the loop ended, the master would no longer plan requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdmesh.services.master_scheduler.admin import adapters
from pdmesh.services.master_scheduler.admin.adapters import Adapters
from tests.support.waiting import until


class BrokenBoard:
    num_looks = 0
    is_closed = False

    def watch(self, on_change: Any) -> BrokenBoard:
        return self

    @property
    def is_current(self) -> bool:
        self.num_looks += 1
        raise KeyError("a bug")

    async def close(self) -> None:
        self.is_closed = True


async def test_a_bug_ends_one_round_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_TICK_S", 0.0)
    board: Any = BrokenBoard()
    registry: Any = None
    loop = asyncio.create_task(Adapters(board, registry, lambda: (True, 1)).run())
    await until(lambda: board.num_looks >= 2)
    loop.cancel()
    await asyncio.wait([loop])
    assert loop.cancelled()
    assert board.is_closed
