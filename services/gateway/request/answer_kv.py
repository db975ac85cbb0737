"""Tells the prefill instance of a chat that the KV of the answer is at the decode instance.

The gateway sends this hint when the answer is complete. If the prefill expects to save time
(`TierStack.prefetch`), it fetches the KV from the decode's host memory into its own. The chat's
next turn then need not compute the answer's blocks or wait for the transfer (ADR 0041).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import structlog

from pdmesh.core.kv.tiers.answer_reuse import AnswerReuse
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.routing.fleet import FleetView, pair_of
from pdmesh.services.gateway.routing.sessions import SessionPool
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import InstanceRecord, PeerRef
from pdmesh.v1.instance_service_pb2 import Command, Prefetch

log = structlog.get_logger(__name__)

_MAX_NAMES: Final = 1024  # block names in one Prefetch command
_MIN_CHANCE: Final = 0.02  # the least chance of a reuse for which a hint is sent
_CHAT: Final = "chat"


class AnswerKv:
    """Sends the hints for all calls of a gateway. If `is_on` is False, it sends none.

    `answered` logs its errors and raises none, because a lost hint must not harm a call.
    """

    def __init__(self, fleet: FleetView, sessions: SessionPool, *, is_on: bool) -> None:
        self._fleet, self._sessions, self._is_on = fleet, sessions, is_on
        self.reuse = AnswerReuse()

    def prompted(self, spec: CallSpec, prompt: Prompt) -> None:
        """Record a new prompt of a chat, to learn how often chats continue an earlier answer."""
        if not (len(self.reuse) and spec.operation == _CHAT):
            return
        reference = self._fleet.reference(spec.base_model)
        if reference is not None:
            self.reuse.prompted(prompt.hashes(reference))

    def answered(
        self,
        spec: CallSpec,
        prompt: Prompt,
        answer: Sequence[int],
        prefill_id: str,
        decode_id: str,
    ) -> None:
        """Send the hint for a completed choice (one answer of a call), if a reuse is likely enough.

        `answer` holds all tokens of the choice. `prefill_id` and `decode_id` name the instances
        that served it last.
        """
        if not self._is_on or spec.operation != _CHAT or prefill_id == decode_id:
            return
        try:
            prefill, decode = self._fleet.instance(prefill_id), self._fleet.instance(decode_id)
            if prefill is not None and decode is not None and _can_give(decode, prefill):
                self._tell(spec, prompt, answer, prefill, decode)
        except Exception:
            log.exception("answer_kv.bug")

    def _tell(
        self,
        spec: CallSpec,
        prompt: Prompt,
        answer: Sequence[int],
        prefill: InstanceRecord,
        decode: InstanceRecord,
    ) -> None:
        # `prompted` looks prompts up by the block names of the reference instance, which represents
        # the model. Instances of another group may name the same blocks differently.
        reference = self._fleet.reference(spec.base_model) or prefill
        if not (known_as := prompt.answer_hashes(reference, answer)):
            return
        scope = spec.base_model, spec.scenario
        chance = self.reuse.chance(scope)
        self.reuse.answered(scope, known_as[-1], time.monotonic())
        if chance < _MIN_CHANCE:
            return
        command = Command(
            prefetch=Prefetch(
                block_hashes=prompt.answer_hashes(prefill, answer)[:_MAX_NAMES],
                cache_salt=prompt.root(prefill.model_fingerprint).hex(),
                peer=PeerRef(instance_id=decode.instance_id, incarnation=decode.incarnation),
                kv_addresses=decode.kv_addresses,
                chance=chance,
            )
        )
        self._sessions.hint(prefill, command)


def _can_give(decode: InstanceRecord, prefill: InstanceRecord) -> bool:
    """Whether the prefill may fetch from the decode's host pools.

    The two instances must have the same number of ranks with host pools, must be able to exchange
    KV, and must not be draining.
    """
    return (
        prefill.takes_prefetches
        and decode.fetches_from_peers
        and not (prefill.is_draining or decode.is_draining)
        and 0 < len(decode.kv_addresses) == len(prefill.kv_addresses)
        and pair_of(prefill) == pair_of(decode)
    )
