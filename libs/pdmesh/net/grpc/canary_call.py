"""Sends a small test request to a prefill and a decode, as a gateway would send it.

The request bypasses the gateways: no gateway counts it, and no tenant pays for it. It shares no KV
with other requests. Its work on one instance is a leg. Each leg has a separate session (a gRPC
stream). When a session ends, the instance frees everything that the request used there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.net.grpc import rpc
from pdmesh.v1.common_pb2 import InstanceRecord, SamplingParams
from pdmesh.v1.instance_service_pb2 import (
    Command,
    FirstToken,
    Hello,
    Prefill,
    Progress,
    SessionEvent,
    SessionRequest,
    Start,
)
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs
_PROMPT: Final = tokens_to_bytes(range(5, 13))
_NUM_TOKENS: Final = 2


class CanaryRefused(Exception):
    """An instance does not accept the request now. This is a valid answer and no fault."""


class CanaryFailed(Exception):
    """An instance cannot be reached, has failed, or did not answer. The message is for people."""


class Canary:
    """One test request. If `decode` is None, `prefill` does both phases.

    `asked` has the instances that the request was sent to so far. If the request fails, one of
    these is the cause.
    """

    def __init__(
        self,
        prefill: InstanceRecord,
        decode: InstanceRecord | None,
        sender_id: str,
        timeout_s: float,
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._sender_id, self._timeout_s = sender_id, timeout_s
        self.asked: list[InstanceRecord] = []
        self._legs: list[_Leg] = []  # one per session opened so far

    async def send(self) -> None:
        """Send the request and wait for its end. Raises CanaryRefused or CanaryFailed.

        If the request timed out while an engine did other work, it counts as refused.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send()
        except grpc.aio.AioRpcError as exc:
            raise CanaryFailed(rpc.failure_of(exc)) from exc
        except TimeoutError as exc:
            if any(leg.is_behind_others for leg in self._legs):
                raise CanaryRefused from exc
            raise CanaryFailed(f"no answer in {self._timeout_s:g} s") from exc

    async def _send(self) -> None:
        # The prefill keeps the staged KV while its session is open, so this session must last
        # until the decode has pulled the KV.
        command = Prefill(
            key=1,
            request_id=f"canary-{secrets.token_hex(8)}",
            prompt_token_ids=_PROMPT,
            sampling=_sampling(_NUM_TOKENS),
            remaining_ms=int(1000 * self._timeout_s),
            is_local=self._decode is None,
            cache_salt=secrets.token_hex(32),
            model=self._prefill.model,
        )
        async with self._leg(self._prefill, Command(prefill=command)) as leg:
            first = (await leg.until("first_token")).first_token
            if self._decode is None:
                await leg.until("finished")
            elif first.HasField("ticket"):
                await self._finish(self._decode, command, first)
            else:  # the prefill has no room for KV now
                raise CanaryRefused

    async def _finish(self, decode: InstanceRecord, asked: Prefill, first: FirstToken) -> None:
        command = Start(
            key=1,
            request_id=asked.request_id,
            prompt_token_ids=_PROMPT,
            first_token_id=first.token_id,
            ticket=first.ticket,
            sampling=_sampling(_NUM_TOKENS - 1),
            remaining_ms=asked.remaining_ms,
            cache_salt=asked.cache_salt,
            model=decode.model,
        )
        async with self._leg(decode, Command(start=command)) as leg:
            await leg.until("finished")

    @contextlib.asynccontextmanager
    async def _leg(self, record: InstanceRecord, command: Command) -> AsyncIterator[_Leg]:
        self.asked.append(record)
        hello = Hello(
            gateway_id=self._sender_id,
            instance_id=record.instance_id,
            incarnation=record.incarnation,
        )
        async with rpc.channel_to(record) as channel:
            # The type is Any because the stubs have only a call that takes an iterator.
            stub: Any = InstanceServiceStub(channel)
            call = stub.Session()
            try:
                await call.write(SessionRequest(commands=[Command(hello=hello), command]))
                self._legs.append(leg := _Leg(call))
                yield leg
            except asyncio.InvalidStateError as exc:
                raise CanaryFailed("the session ended") from exc
            finally:
                call.cancel()


class _Leg:
    def __init__(self, call: Any) -> None:  # grpc-stubs cannot type it
        self._call, self._events = call, deque[SessionEvent]()
        self._num_open_tokens, self._has_worked = 0, False
        self._num_signs: int | None = None

    @property
    def is_behind_others(self) -> bool:
        """Whether the engine made progress while this leg waited, and has work besides the leg."""
        return self._has_worked and self._num_open_tokens > len(_PROMPT) // 4 + _NUM_TOKENS

    async def until(self, kind: str) -> SessionEvent:
        while True:
            while self._events:
                event = self._events.popleft()
                match event.WhichOneof("event"):
                    case found if found == kind:
                        return event
                    case "rejected":
                        raise CanaryRefused
                    case "failed":
                        raise CanaryFailed(event.failed.reason)
            response = await self._call.read()
            if response is _EOF:
                raise CanaryFailed("the session ended")
            self._events.extend(response.events)
            if response.HasField("progress"):
                self._note(response.progress)

    def _note(self, progress: Progress) -> None:
        self._has_worked = self._has_worked or self._num_signs not in (None, progress.num_signs)
        self._num_signs, self._num_open_tokens = progress.num_signs, progress.num_open_tokens


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, top_p=1.0, ignore_eos=True)
