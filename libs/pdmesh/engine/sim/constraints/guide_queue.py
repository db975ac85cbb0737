"""Compiles the constraints of requests in threads, so that the simulated engine's loop runs on.

A request with a constraint draws no token before its constraint is compiled to a guide. A guide
follows an answer and decides which tokens may come next. A leg is a request's stay on this engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdmesh.engine.base import Sampling
from pdmesh.engine.grammars.compiler import GrammarCompiler, GrammarRefused
from pdmesh.engine.grammars.guide import Guide
from pdmesh.engine.sim.constraints.draws import LimitedGuide
from pdmesh.engine.sim.constraints.tokenizer import sim_vocabulary
from pdmesh.net.tasks import watched


class GuideQueue:
    """The guides of legs that have not drawn a token here.

    `prepare` adds a leg; `take` or `abort` removes the leg. If a constraint cannot be compiled, its
    leg is removed and `refuse` is called with the leg.
    """

    def __init__(self, refuse: Callable[[int], None], die: Callable[[BaseException], None]) -> None:
        self._refuse, self._die = refuse, die
        self._compiler = GrammarCompiler(sim_vocabulary)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._then: dict[int, Callable[[], None]] = {}
        self._guides: dict[int, LimitedGuide] = {}

    def __len__(self) -> int:
        return len(self._tasks) + len(self._guides)

    def prepare(self, leg: int, sampling: Sampling, drawn: Sequence[int]) -> None:
        """Begin to compile the constraint of `sampling`. `drawn` is the answer so far."""
        work = self._prepare(leg, sampling, drawn)
        self._tasks[leg] = watched(work, f"guide-{leg}", self._die)

    def when_ready(self, leg: int, then: Callable[[], None]) -> None:
        """Call `then` once the leg's guide is ready, or immediately if the leg needs no guide."""
        if leg in self._tasks:
            self._then[leg] = then
        else:
            then()

    def take(self, leg: int) -> LimitedGuide | None:
        """Remove and return the leg's guide, or None if the leg has no constraint."""
        return self._guides.pop(leg, None)

    def abort(self, leg: int) -> None:
        if (task := self._tasks.pop(leg, None)) is not None:
            task.cancel()
        self._then.pop(leg, None)
        self._guides.pop(leg, None)

    async def _prepare(self, leg: int, sampling: Sampling, drawn: Sequence[int]) -> None:
        constraint = sampling.constraint
        assert constraint is not None
        try:
            guide = await asyncio.to_thread(Guide.after, constraint, self._compiler, drawn)
        except GrammarRefused:
            del self._tasks[leg]
            self._then.pop(leg, None)
            self._refuse(leg)
            return
        self._guides[leg] = LimitedGuide(guide, sampling.shaping.allowed_token_ids)
        del self._tasks[leg]
        if (then := self._then.pop(leg, None)) is not None:
            then()
