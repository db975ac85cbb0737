"""Runs the process that compiles grammars.

The process is started for the first grammar, and started again if it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from typing import Final
from weakref import WeakKeyDictionary

import msgspec
import structlog

from pdmesh.engine.grammars.asked_grammars import AskedGrammar
from pdmesh.engine.grammars.checker import FRAME, Check, Checked, LoadVocabulary
from pdmesh.services.gateway.text.tokenizer import Tokenizer

# If the process does not answer within this time, it is killed. The process also has a limit of CPU
# time.
_ANSWER_S: Final = 60.0
_MODULE: Final = "pdmesh.engine.grammars.checker"
_BY_A_GRAMMAR: Final = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
log = structlog.get_logger(__name__)


class CheckInterrupted(Exception):
    """The process ended, and the cause may be something other than a grammar."""


class KilledByGrammar(Exception):
    """The process ended in a way that only a grammar causes.

    If `is_certain` is true, the grammar of this check is the cause. Otherwise an earlier grammar
    may have used up the memory.
    """

    def __init__(self, *, is_certain: bool) -> None:
        super().__init__("a grammar ended the process")
        self.is_certain = is_certain


class GrammarProcess:
    """Compiles grammars in a process. The caller must run only one check at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._num_checked = 0  # how many checks the present process has made
        self._loaded: set[int] = set()  # keys of the vocabularies that the process has
        self._keys: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()
        self._new_keys = itertools.count(1)

    def key(self, tokenizer: Tokenizer) -> int:
        """A number that identifies the tokenizer until it is freed."""
        if (key := self._keys.get(tokenizer)) is None:
            key = self._keys[tokenizer] = next(self._new_keys)
        return key

    async def check(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked:
        """Compile a grammar. Raises CheckInterrupted, KilledByGrammar."""
        try:
            checked = await self._checked(asked, tokenizer)
            if checked.is_unknown:  # the process has dropped this vocabulary
                self._loaded.discard(self.key(tokenizer))
                checked = await self._checked(asked, tokenizer)
        except asyncio.CancelledError:
            await self.close()  # otherwise the next check would read the answer to this check
            raise
        self._num_checked += 1
        return checked

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _checked(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        key = self.key(tokenizer)
        if key not in self._loaded:
            await _answer(process, await asyncio.to_thread(_load, key, tokenizer))
            self._loaded.add(key)
        try:
            answer = await _answer(process, msgspec.json.encode(Check(key, asked)))
        except CheckInterrupted:
            code = process.returncode
            if code not in _BY_A_GRAMMAR:
                raise
            # Each check has its own limit of CPU time. So after a SIGXCPU, this grammar is the
            # cause.
            is_certain = code == -signal.SIGXCPU or not self._num_checked
            raise KilledByGrammar(is_certain=is_certain) from None
        return msgspec.json.decode(answer, type=Checked)

    async def _start(self) -> asyncio.subprocess.Process:
        self._loaded.clear()
        self._num_checked = 0
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self._process


async def _answer(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    """Send a frame and read the answer to it.

    Raises CheckInterrupted if the process ends, or if it was killed because it did not answer.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_ANSWER_S):
            process.stdin.write(FRAME.pack(len(frame)))
            process.stdin.write(frame)
            await process.stdin.drain()
            (size,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
            return await process.stdout.readexactly(size)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
        if isinstance(exc, TimeoutError):
            process.kill()
        code = await process.wait()
        log.warning("grammar_check.ended", returncode=code)
        raise CheckInterrupted from None


def _load(key: int, tokenizer: Tokenizer) -> bytes:
    eos = tokenizer.eos_token_id
    end = min(tokenizer.eos_token_ids, default=-1) if eos is None else eos
    text = msgspec.Raw(tokenizer.to_json().encode())
    return msgspec.json.encode(LoadVocabulary(key, text, tokenizer.vocab_size, end))
