"""Chooses the scenario of a call that names no scenario.

A scenario is a kind of requests with its own instances and SLOs. The gateway's rules are tried
first. If no rule fits, the call's model determines the scenario.

A rule may bound how many tokens of the prompt must still be computed, even on the instance with the
most cached tokens. The master is asked for the cached tokens only if such a rule may decide. If no
master answers, all tokens count as not cached, so the rule fits only short prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import grpc
import structlog

from pdmesh.core.request.scenario_rules import ScenarioRule, depends_on_cache, scenario_by_rule
from pdmesh.errors import MeshError, Unavailable
from pdmesh.net import tasks
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.scheduler_service_pb2 import MatchPrefixRequest
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

log = structlog.get_logger(__name__)

_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
_RETRY_MASTER_S: Final = 0.25  # after a failure, no master is asked for this time


class Matching(Protocol):
    async def held_by_scenario(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """The number of leading blocks that the best instance of each scenario has cached.

        Empty if no master answers.
        """
        ...


class PrefixMatches:
    """Asks the leading master how much of a prompt the instances of each scenario have cached."""

    def __init__(self, fleet: FleetView, gateway_id: str, *, timeout_s: float) -> None:
        self._fleet, self._gateway_id, self._timeout_s = fleet, gateway_id, timeout_s
        self._where = ("", "")  # id and address of the leader that the channel connects to
        self._channel: grpc.aio.Channel | None = None
        self._ask_at = 0.0
        self._closing: set[asyncio.Future[None]] = set()  # channels to former leaders

    async def held_by_scenario(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """See `Matching.held_by_scenario`."""
        if not block_hashes or time.monotonic() < self._ask_at:
            return _NOTHING
        try:
            return await self._ask(block_hashes)
        except MeshError as exc:
            log.debug("scenario.match_failed", reason=exc.reason)
            self._ask_at = time.monotonic() + _RETRY_MASTER_S
            return _NOTHING

    async def _ask(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """Raises MeshError."""
        leader = next((m for m in self._fleet.masters() if m.is_leader), None)
        if leader is None:
            raise Unavailable("no master leads")
        channel = self._channel_to(leader)
        asked = MatchPrefixRequest(gateway_id=self._gateway_id, block_hashes=block_hashes)
        # The type is Any because grpc-stubs knows only the calls of synchronous channels.
        stub: Any = SchedulerServiceStub(channel)
        try:
            answer = await stub.MatchPrefix(asked, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise rpc.from_rpc_error(exc) from exc
        except asyncio.CancelledError as exc:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable("the channel to a former master was closed") from exc
        return dict(answer.num_blocks)

    def _channel_to(self, leader: InstanceRecord) -> grpc.aio.Channel:
        where = leader.instance_id, leader.grpc_address
        if self._channel is None or self._where != where:
            before, self._where = self._channel, where
            self._channel = rpc.channel_to(leader)
            if before is not None:  # requests in flight may still be answered
                closing = asyncio.ensure_future(before.close(self._timeout_s))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._channel

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        await tasks.end([*self._closing])


@dataclass(frozen=True, slots=True)
class Asked:
    """The properties of a call that rules look at.

    `hashes` returns the names of the prompt's blocks. It is called only if a rule needs them.
    """

    operation: str
    model: str
    num_prompt_tokens: int
    hashes: Callable[[InstanceRecord], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class ScenarioChooser:
    rules: Sequence[ScenarioRule]
    fleet: FleetView
    matches: Matching

    async def choose(self, asked: Asked) -> tuple[str, str]:
        """Return the scenario, and `rule` or `model` for how it was chosen.

        A rule applies only if an instance of its scenario serves the call's model, or did so
        recently.
        """
        if self.rules:
            rules = [r for r in self.rules if self.fleet.has_served(asked.model, r.scenario)]
            cached = _NOTHING
            if depends_on_cache(rules, asked.operation, asked.num_prompt_tokens):
                cached = await self._cached(asked)
            found = scenario_by_rule(rules, asked.operation, asked.num_prompt_tokens, cached)
            if found is not None:
                return found, "rule"
        return self.fleet.scenario_of(asked.model), "model"

    async def _cached(self, asked: Asked) -> Mapping[str, int]:
        """The number of cached tokens of the prompt, by scenario."""
        reference = self.fleet.reference(asked.model)
        if reference is None:
            return _NOTHING
        held = await self.matches.held_by_scenario(asked.hashes(reference))
        return {scenario: n * reference.block_size for scenario, n in held.items()}
