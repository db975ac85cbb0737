"""The process beside the gateway in which vLLM's parsers run.

Importing vLLM takes seconds of CPU and half a gigabyte of memory, and the time of its parsers has
no bound. Both would harm the process that serves all clients. The parser process starts when
`early_start` or the first call needs it. If the process dies, or hangs and is killed, it is started
again when it is needed. The answers under way are then parsed again from their first token.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import structlog

from pdmesh.core.control.hung_parser import HungParser
from pdmesh.errors import Unavailable
from pdmesh.net.tasks import end
from pdmesh.services.gateway.parsing.child import MAX_MODELS
from pdmesh.services.gateway.parsing.cpu_time import cpu_seconds
from pdmesh.services.gateway.parsing.frames import (
    LENGTH,
    CloseAnswer,
    LoadParsers,
    ParserDone,
    ParserReply,
    ParserRequest,
    ParsingFailed,
    framed,
    replies,
)
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_starts = metrics.histogram(
    names.GATEWAY_PARSER_STARTS, "Starts of the process of the parsers, by outcome"
)
_STARTED: Final = {names.ATTR_OUTCOME: "started"}
_FAILED: Final = {names.ATTR_OUTCOME: "failed"}

_COMMAND: Final = (sys.executable, "-m", "pdmesh.services.gateway.parsing.child")
# Limits on the processor time of a request, and on the time in which its process does no work
# (`core.control.hung_parser`).
_START_S: Final = 180.0  # to import vLLM
_LOAD_S: Final = 120.0  # to load a model's parsers and import their modules
_END_S: Final = 5.0  # the longest time from the end of the process's output to its exit
_ANSWER_S: Final = 30.0  # a parser that takes longer counts as hung
_CHECKS: Final = 4  # how often a waiting request checks the process, within the request's limit


class ParserLost(Exception):
    """The process has ended. `is_guilty` means that it was working on this request."""

    def __init__(self, *, is_guilty: bool) -> None:
        super().__init__()
        self.is_guilty = is_guilty


class ParserUnavailable(Unavailable):
    default_reason = "PARSER_UNAVAILABLE"


class ParserProcess:
    """Starts the process when it is first needed, and again if it has ended."""

    def __init__(
        self,
        command: Sequence[str] = _COMMAND,
        answer_s: float = _ANSWER_S,
        needs: str = "vllm",
    ) -> None:
        """`needs` is the package without which the process cannot start."""
        self._needs = needs
        self._command = command
        self._answer_s = answer_s
        self._life: ParserLife | None = None
        self._starting: asyncio.Task[ParserLife] | None = None

    @cached_property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self._needs) is not None

    async def life(self) -> ParserLife:
        """The running process, started if necessary. Raises ParserUnavailable.

        If the caller is cancelled, the start continues.
        """
        if self._life is not None and not self._life.is_over:
            return self._life
        if self._starting is None:
            work = ParserLife.begin(self._command, self._answer_s)
            self._starting = asyncio.create_task(work, name="parser-start")
            self._starting.add_done_callback(self._on_started)
        starting = self._starting
        await asyncio.wait({starting})
        if starting.cancelled():
            raise ParserUnavailable("the gateway is shutting down")
        return starting.result()

    def _on_started(self, starting: asyncio.Task[ParserLife]) -> None:
        self._starting = None
        if not starting.cancelled() and starting.exception() is None:
            self._life = starting.result()

    @property
    def pid(self) -> int | None:
        return None if self._life is None or self._life.is_over else self._life.pid

    async def close(self) -> None:
        if self._starting is not None:
            await end([self._starting])
        if self._life is not None:
            await self._life.end()


@dataclass(frozen=True, slots=True)
class _Asked:
    reply: asyncio.Future[ParserReply]
    limit_s: float


class ParserLife:
    """One life of the process. Its replies come in the order of the requests."""

    def __init__(self, process: asyncio.subprocess.Process, answer_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._answer_s = answer_s
        self._stdin, self._stdout = process.stdin, process.stdout
        self._waiting: deque[_Asked] = deque()
        self._hung = HungParser()  # watches the oldest request
        # The models that the process keeps, in the process's own order: the least recently used
        # first.
        self._models: OrderedDict[str, None] = OrderedDict()
        self._loading = asyncio.Lock()
        self.is_over = False
        self._reader = asyncio.create_task(self._read(), name="parser-replies")

    @classmethod
    async def begin(cls, command: Sequence[str], answer_s: float) -> ParserLife:
        began_at = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        life = cls(process, answer_s)
        try:
            reply = await life._answered(_START_S)
        except ParserLost:
            reply = ParsingFailed("it ended while it started")
        except BaseException:
            await life.end()
            raise
        if not isinstance(reply, ParserDone):
            await life.end()
            cause = (
                reply.message if isinstance(reply, ParsingFailed) else "it answered something else"
            )
            log.warning("parser.not_started", reason=cause)
            _starts.record(time.monotonic() - began_at, _FAILED)
            raise ParserUnavailable("the process of the parsers cannot be started")
        start_s = time.monotonic() - began_at
        log.info("parser.started", pid=life.pid, start_s=round(start_s, 1))
        _starts.record(start_s, _STARTED)
        return life

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, request: ParserRequest, limit_s: float | None = None) -> ParserReply:
        """Raises ParserLost."""
        if self.is_over:
            raise ParserLost(is_guilty=False)
        self._stdin.write(framed(request))
        return await self._answered(limit_s or self._answer_s)

    def close_choice(self, choice: int) -> None:
        if not self.is_over:
            self._stdin.write(framed(CloseAnswer(choice)))

    async def loaded(self, request: LoadParsers) -> ParserReply:
        """Load the model's parsers. Raises ParserLost."""
        async with self._loading:
            if self.has(request.model):
                return ParserDone()
            self._models[request.model] = None
            while len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
            reply = await self.ask(request, _LOAD_S)
            if not isinstance(reply, ParserDone):
                self._models.pop(request.model, None)
            return reply

    def has(self, model: str) -> bool:
        """Whether the process has the model's parsers.

        Call `has` before each use, because it marks the parsers as used.
        """
        if model not in self._models:
            return False
        self._models.move_to_end(model)
        return True

    async def _answered(self, limit_s: float) -> ParserReply:
        asked = _Asked(asyncio.get_running_loop().create_future(), limit_s)
        if not self._waiting:
            self._begin_next()
        self._waiting.append(asked)
        if self.is_over:
            self._lose()
        while not asked.reply.done():
            await asyncio.wait({asked.reply}, timeout=limit_s / _CHECKS)
            if not asked.reply.done():
                self._check_oldest()
        return await asked.reply

    def _begin_next(self) -> None:
        self._hung.begin(time.monotonic(), cpu_seconds(self.pid))

    def _check_oldest(self) -> None:
        """Kill the process if it hangs over its oldest request, whose caller may have left."""
        limit_s = self._waiting[0].limit_s
        if self._hung.is_hung(limit_s, time.monotonic(), cpu_seconds(self.pid)):
            log.warning("parser.silent", pid=self.pid, silent_s=limit_s)
            self._kill()

    async def _read(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
                reply = replies.decode(await self._stdout.readexactly(size))
                asked = self._waiting.popleft()
                self._begin_next()
                if not asked.reply.done():
                    asked.reply.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self.is_over:
                log.warning("parser.lost", pid=self.pid, num_waiting=len(self._waiting))
        finally:
            self._lose()
            await self._gone()

    def _lose(self) -> None:
        """Fail all requests. Only the oldest is guilty, because the process was working on it."""
        self.is_over = True
        is_guilty = True
        while self._waiting:
            asked = self._waiting.popleft()
            if not asked.reply.done():
                asked.reply.set_exception(ParserLost(is_guilty=is_guilty))
            is_guilty = False

    async def _gone(self) -> None:
        """Wait for the process, whose stdout has ended, and kill it only if it does not end."""
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        self.is_over = True
        self._kill()
        await asyncio.wait({self._reader})
