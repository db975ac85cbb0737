"""Checks a grammar by compiling it in a separate process, before the request goes to an instance.

One grammar is compiled at a time. The other checks wait in a waiting room, as requests wait for a
slot, and the tenants take turns. Equal grammars are compiled once. If all clients of a waiting
check have left, the check is dropped. A check that has begun is not stopped, because its time is
bounded and starting a new process would take longer.

If a grammar kills the process, requests with this grammar get the status 400. But if the process
compiled other grammars before, one of these may be the cause. In this case the grammar is first
compiled again, alone in a new process.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import structlog

from pdmesh.core.request.waiting_room import Claim, WaitingRoom
from pdmesh.core.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.engine.grammars.asked_grammars import AskedGrammar
from pdmesh.engine.grammars.checker import Check, Checked
from pdmesh.errors import InvalidRequest, MeshError, Overloaded
from pdmesh.services.gateway.text.grammar_process import CheckInterrupted, KilledByGrammar
from pdmesh.services.gateway.text.tokenizer import Tokenizer

_MAX_WAITING: Final = 64
_MAX_KEPT: Final = 1024
_MAX_KEPT_BYTES: Final = 8 << 20
_TOO_COMPLEX: Final = Checked(refusal="it takes too much time or memory to compile")
_PROCESS: Final = "process"  # stands for the process in the waiting room, in place of an instance
log = structlog.get_logger(__name__)


class Checker(Protocol):
    """`GrammarProcess`, or a test's double."""

    def key(self, tokenizer: Tokenizer) -> int: ...

    async def check(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Check:
    name: bytes
    asked: AskedGrammar
    tokenizer: Tokenizer
    has_begun: bool = False
    places: dict[str, _Place] = field(default_factory=dict)  # by tenant


@dataclass(slots=True)
class _Place:
    """A tenant's place in the waiting room, for one check. `number` is the id of the place."""

    check: _Check
    tenant: str
    done: asyncio.Future[Checked]
    number: int = 0
    num_waiting: int = 0  # requests of the tenant that wait for the check


class GrammarChecks:
    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._room: WaitingRoom[_Place] = WaitingRoom(_MAX_WAITING)
        self._order = itertools.count()
        self._checks: dict[bytes, _Check] = {}
        self._work: asyncio.Task[None] | None = None
        self._kept: OrderedDict[bytes, Checked] = OrderedDict()
        self._num_bytes = 0

    async def grammar(self, asked: AskedGrammar, tokenizer: Tokenizer, tenant: Tenant) -> str:
        """The grammar in the form that engines get.

        Raises InvalidRequest with the field, or Overloaded.
        """
        if len(asked.text) > MAX_GRAMMAR_BYTES // 2:
            message = f"{asked.field} has more than {MAX_GRAMMAR_BYTES // 2} characters"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        checked = await self._checked(asked, tokenizer, tenant)
        if checked.refusal:
            message = f"{asked.field} cannot be compiled: {checked.refusal}"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        if len(checked.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            message = f"{asked.field} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=asked.field)
        return checked.grammar

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        for check in self._checks.values():
            for place in check.places.values():
                place.done.cancel()
        await self._checker.close()

    # --- waiting checks --------------------------------------------------------------------------

    async def _checked(self, asked: AskedGrammar, tokenizer: Tokenizer, tenant: Tenant) -> Checked:
        body = msgspec.json.encode(Check(self._checker.key(tokenizer), asked))
        name = hashlib.blake2b(body, digest_size=16).digest()
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return kept
        check = self._checks.get(name) or _Check(name, asked, tokenizer)
        place = check.places.get(tenant.name) or self._joined(check, tenant)
        place.num_waiting += 1
        try:
            return await asyncio.shield(place.done)  # other requests may wait for the same check
        finally:
            place.num_waiting -= 1
            if not place.num_waiting and not check.has_begun and not place.done.done():
                self._room.leave(place.number)
                self._forget(place)

    def _joined(self, check: _Check, tenant: Tenant) -> _Place:
        """Let the tenant wait for the check. Raises Overloaded."""
        place = _Place(check, tenant.name, asyncio.get_running_loop().create_future())
        if not check.has_begun:
            claim = Claim(tenant.name, tenant.weight, tenant.priority)
            joined = self._room.join(place, (_PROCESS,), next(self._order), claim)
            if joined is None:
                raise _overloaded()
            place.number = joined.number
            if (evicted := joined.evicted) is not None:
                self._forget(evicted)
                _fail(evicted, _overloaded())
        check.places[tenant.name] = place
        self._checks[check.name] = check
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run(), name="grammar-checks")
        return place

    def _forget(self, place: _Place) -> None:
        del place.check.places[place.tenant]
        if not place.check.places:
            del self._checks[place.check.name]

    # --- the running check -----------------------------------------------------------------------

    async def _run(self) -> None:
        while called := self._room.call(_PROCESS, 1):
            check = called[0].check
            check.has_begun = True
            for place in check.places.values():
                self._room.leave(place.number)
            await self._end(check)

    async def _end(self, check: _Check) -> None:
        error: Exception | None = None
        try:
            checked = await self._verdict(check)
            self._keep(check.name, checked)
        except CheckInterrupted:
            error = Overloaded("the check of a grammar was interrupted")
        except Exception as exc:
            log.exception("grammar_check.bug")
            error = exc
        del self._checks[check.name]
        for place in check.places.values():
            if error is not None:
                _fail(place, error)
            else:
                place.done.set_result(checked)

    async def _verdict(self, check: _Check) -> Checked:
        """Raises CheckInterrupted."""
        try:
            return await self._checker.check(check.asked, check.tokenizer)
        except KilledByGrammar as exc:
            if exc.is_certain:
                return _TOO_COMPLEX
        try:
            return await self._checker.check(check.asked, check.tokenizer)
        except KilledByGrammar:
            return _TOO_COMPLEX

    def _keep(self, name: bytes, checked: Checked) -> None:
        self._kept[name] = checked
        self._num_bytes += len(checked.grammar)
        while self._num_bytes > _MAX_KEPT_BYTES or len(self._kept) > _MAX_KEPT:
            self._num_bytes -= len(self._kept.popitem(last=False)[1].grammar)


def _overloaded() -> MeshError:
    return Overloaded("too many grammars wait to be compiled")


def _fail(place: _Place, error: Exception) -> None:
    place.done.set_exception(error)
    place.done.exception()  # marks the error as read, because all waiting requests may have left
