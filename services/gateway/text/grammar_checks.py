"""Compiles grammars in a separate process, before a request takes a slot anywhere.

The process starts with the first grammar. If a grammar kills it, it is replaced: that grammar and
later ones that equal it get a 400. Equal grammars are compiled once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import signal
import sys
from collections import OrderedDict
from typing import Final
from weakref import WeakKeyDictionary

import msgspec
import structlog

from pdmesh.core.sampling.constraint import MAX_GRAMMAR_BYTES
from pdmesh.engine.grammars.asked import AskedGrammar
from pdmesh.engine.grammars.checker import FRAME, Check, Checked, LoadVocabulary
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.text.tokenizer import Tokenizer

# For a process that neither answers nor ends; its CPU time is bounded more tightly.
_ANSWER_S: Final = 60.0
_MAX_WAITING: Final = 64
_MAX_KEPT: Final = 1024
_MAX_KEPT_BYTES: Final = 8 << 20
_TOO_COMPLEX: Final = Checked(refusal="it takes too much time or memory to compile")
_MODULE: Final = "pdmesh.engine.grammars.checker"
_BY_A_GRAMMAR: Final = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
log = structlog.get_logger(__name__)


class GrammarChecks:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: set[int] = set()  # keys of the vocabularies that the process has
        self._keys: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()
        self._new_keys = itertools.count(1)
        self._turn = asyncio.Lock()
        self._checks: dict[bytes, asyncio.Task[Checked]] = {}
        self._kept: OrderedDict[bytes, Checked] = OrderedDict()
        self._num_bytes = 0

    async def grammar(self, asked: AskedGrammar, tokenizer: Tokenizer) -> str:
        """The grammar in the form for engines. Raises InvalidRequest with the field, Overloaded."""
        if len(asked.text) > MAX_GRAMMAR_BYTES // 2:
            message = f"{asked.field} has more than {MAX_GRAMMAR_BYTES // 2} characters"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        checked = await self._checked(asked, tokenizer)
        if checked.refusal:
            message = f"{asked.field} cannot be compiled: {checked.refusal}"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        if len(checked.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            message = f"{asked.field} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        return checked.grammar

    async def close(self) -> None:
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await self._end()

    async def _checked(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked:
        key = self._keys.setdefault(tokenizer, 0) or next(self._new_keys)
        self._keys[tokenizer] = key
        body = msgspec.json.encode(Check(key, asked))
        name = hashlib.blake2b(body, digest_size=16).digest()
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return kept
        if (check := self._checks.get(name)) is None:
            if len(self._checks) >= _MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled")
            work = self._in_turn(name, key, body, tokenizer)
            check = asyncio.create_task(work, name="grammar-check")
            self._checks[name] = check
            check.add_done_callback(lambda _: self._checks.pop(name, None))
        return await asyncio.shield(check)  # other requests may also wait for it

    async def _in_turn(self, name: bytes, key: int, body: bytes, tokenizer: Tokenizer) -> Checked:
        async with self._turn:
            checked = await self._ask(key, body, tokenizer)
            if checked.is_unknown:  # the process has dropped this vocabulary for later ones
                self._loaded.discard(key)
                checked = await self._ask(key, body, tokenizer)
        self._kept[name] = checked
        self._num_bytes += len(checked.grammar)
        while self._num_bytes > _MAX_KEPT_BYTES or len(self._kept) > _MAX_KEPT:
            self._num_bytes -= len(self._kept.popitem(last=False)[1].grammar)
        return checked

    async def _ask(self, key: int, body: bytes, tokenizer: Tokenizer) -> Checked:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                if key not in self._loaded:
                    load = await asyncio.to_thread(_load, key, tokenizer)
                    process.stdin.write(FRAME.pack(len(load)) + load)
                    self._loaded.add(key)
                process.stdin.write(FRAME.pack(len(body)) + body)
                await process.stdin.drain()
                (size,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
                answer = await process.stdout.readexactly(size)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
            if isinstance(exc, TimeoutError):
                process.kill()
            code = await process.wait()
            log.warning("grammar_check.ended", returncode=code)
            if code in _BY_A_GRAMMAR or isinstance(exc, TimeoutError):
                return _TOO_COMPLEX
            raise Overloaded("the check of a grammar was interrupted") from None
        except asyncio.CancelledError:
            await self._end()  # else its answer would be read as that of the next request
            raise
        return msgspec.json.decode(answer, type=Checked)

    async def _start(self) -> asyncio.subprocess.Process:
        self._loaded.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _load(key: int, tokenizer: Tokenizer) -> bytes:
    eos = tokenizer.eos_token_id
    end = min(tokenizer.eos_token_ids, default=-1) if eos is None else eos
    load = LoadVocabulary(key, tokenizer.to_json(), tokenizer.vocab_size, end)
    return msgspec.json.encode(load)
