"""Starts the parsers before the first chat that needs them.

The parser process takes ten seconds to start, or a minute on a busy machine. Every chat with a
model that has a reasoning parser is parsed. So the process starts as soon as such a model is
served, and again if it dies. Other models need the process for tool calls only. For these models,
the process starts early only if a setting says so. Otherwise it starts with the first call that
needs it.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from pdmesh.errors import MeshError
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.parsing.child import MAX_MODELS
from pdmesh.services.gateway.parsing.parser_process import ParserUnavailable
from pdmesh.services.gateway.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0
_RETRY_S: Final = 30.0  # the pause after a start that failed
_PATIENCE_S: Final = 120.0  # the longest that the gateway's readiness waits
_MAX_LOOKED_AT: Final = 8  # models whose tokenizers are loaded to see if they need parsers

_Served = tuple[str, str]  # a model's name, and the digest of its tokenizer files


class EarlyStart:
    """`served` returns the models that instances serve.

    `is_settled` becomes true, and stays true, when the parsers of the first served models have
    started or failed to start. It becomes true at the latest 120 s after a model is first served. A
    gateway whose instances make answers is not ready before that. If the settings allow no parsers
    or vLLM is not installed, `is_settled` is true from the beginning.
    """

    def __init__(
        self,
        parsers: AnswerParsers,
        served: Callable[[], Sequence[_Served]],
        tokenizer_of: Callable[[str], Awaitable[Tokenizer]],
        *,
        is_for_tools: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `is_for_tools`, the models that need parsers only for tool calls are included."""
        self._parsers, self._served, self._tokenizer_of = parsers, served, tokenizer_of
        self._is_for_tools = is_for_tools
        self._clock = clock
        self._needing: dict[_Served, weakref.ref[Tokenizer] | None] = {}
        # The id of the process in which the model's parsers were loaded.
        self._prepared: dict[_Served, int | None] = {}
        self._retry_at = 0.0
        self._seen_at: float | None = None  # when the first model was seen
        self._is_settled = not self.is_of_use

    @property
    def is_of_use(self) -> bool:
        return self._parsers.is_installed and self._parsers.may_be_needed(
            for_tools=self._is_for_tools
        )

    @property
    def is_settled(self) -> bool:
        if not self._is_settled and self._seen_at is not None:
            self._is_settled = self._clock() - self._seen_at > _PATIENCE_S
        return self._is_settled

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        served = list(self._served()[:_MAX_LOOKED_AT])
        if served and self._seen_at is None:
            self._seen_at = self._clock()
        for known in (self._needing, self._prepared):
            for key in [key for key in known if key not in served]:
                del known[key]
        await asyncio.gather(*(self._look_at(key) for key in served if key not in self._needing))
        for key in [key for key in served if self._needing.get(key)][:MAX_MODELS]:
            await self._prepare(key)
        self._is_settled = self._is_settled or bool(served)

    async def _look_at(self, key: _Served) -> None:
        try:
            tokenizer = await self._tokenizer_of(key[0])
        except MeshError:
            return  # the pool of tokenizers has logged why; the next step asks it again
        is_needed = self._parsers.is_needed(tokenizer, for_tools=self._is_for_tools)
        self._needing[key] = weakref.ref(tokenizer) if is_needed else None

    async def _prepare(self, key: _Served) -> None:
        reference = self._needing[key]
        tokenizer = reference() if reference is not None else None
        is_prepared = key in self._prepared and self._prepared[key] == self._parsers.pid
        if tokenizer is None or is_prepared or self._clock() < self._retry_at:
            return
        try:
            await self._parsers.warm_up(tokenizer)
        except ParserUnavailable:
            self._retry_at = self._clock() + _RETRY_S
            return
        except MeshError as exc:  # the first chat reports this to its client
            log.warning("parser.not_prepared", model=key[0], reason=exc.message)
        self._prepared[key] = self._parsers.pid
