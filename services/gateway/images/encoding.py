"""Lets an encoder make the embeddings of a prompt's images while the prefill waits (S130).

An encoder is an instance that only encodes images. It holds the embeddings, and the prefill fetches
them. The gateway tells the prefill whether the encoder succeeded. The prefill has the images too,
and encodes them itself if the encoder failed. So no failure in this module fails the request. A leg
is a request's stay on one instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from pdmesh.core.images.encoder_choice import choose_encoder
from pdmesh.core.model import PeerId
from pdmesh.core.request.events import (
    Event,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegLost,
    LegRejected,
)
from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.services.gateway.routing.sessions import InstanceSession, SessionPool
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import InstanceRecord, PeerRef, TokenLogprob
from pdmesh.v1.instance_service_pb2 import Abort, Command, Embedded, SessionEvent

log = structlog.get_logger(__name__)

_prompts: Final = metrics.counter(
    names.GATEWAY_ENCODED_PROMPTS,
    "Prompts whose images an encoder was asked to encode, by outcome: encoded, or left to the "
    "prefill because the encoder refused, failed, was lost, or the request went on without it",
)
_OUTCOMES: Final[dict[type[Event], str]] = {
    LegFinished: "encoded",
    LegRejected: "refused",
    LegFailed: "failed",
    LegLost: "lost",
}


@dataclass(frozen=True, slots=True)
class Encoder:
    record: InstanceRecord
    session: InstanceSession


def find_encoder(
    fleet: FleetView, sessions: SessionPool, record: InstanceRecord, digest: bytes
) -> Encoder | None:
    """The encoder for the images of a prompt that `record` computes. None if none is free.

    `digest` is the digest of the prompt's first image.
    """
    found: dict[PeerId, Encoder] = {}
    for encoder in fleet.encoders(record):
        session = sessions.session(encoder)
        if session.is_usable and not session.is_full:
            found[PeerId(encoder.instance_id, encoder.incarnation)] = Encoder(encoder, session)
    chosen = choose_encoder(found, digest)
    return found[chosen] if chosen is not None else None


class EncodeLeg:
    """The leg of one prompt's images at an encoder, under `key`.

    `prefill` is the session to the prefill that waits for the embeddings, and `prefill_key` is the
    key of its leg.
    """

    def __init__(
        self, encoder: Encoder, key: int, prefill_key: int, prefill: InstanceSession
    ) -> None:
        self._encoder, self._key = encoder, key
        self._prefill_key, self._prefill = prefill_key, prefill
        self._is_over = False

    def begin(self, command: Command) -> None:
        if not self._encoder.session.open_leg(self._key, self, command):
            self._tell("lost")

    def end(self) -> None:
        """Abort the leg, because the prefill has ended and waits for no embeddings any more."""
        if not self._is_over:
            self._is_over = True
            self._encoder.session.forget(self._key)
            self._encoder.session.send(Command(abort=Abort(key=self._key)))
            _prompts.add(1, {names.ATTR_OUTCOME: "unawaited"})

    # -- what the encoder says --------------------------------------------------------------------

    def on_event(self, event: Event, detail: SessionEvent | None = None) -> None:
        if self._is_over or isinstance(event, LegAccepted):
            return
        if (outcome := _OUTCOMES.get(type(event))) is not None:
            self._encoder.session.forget(self._key)
            self._tell(outcome)

    def on_token(self, key: int, token_id: int, now: float) -> None:
        """An encoder draws no tokens."""

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None:
        """An encoder draws no tokens."""

    def _tell(self, outcome: str) -> None:
        self._is_over = True
        _prompts.add(1, {names.ATTR_OUTCOME: outcome})
        embedded = Embedded(key=self._prefill_key)
        record = self._encoder.record
        if outcome == "encoded":
            encoder = PeerRef(instance_id=record.instance_id, incarnation=record.incarnation)
            embedded.encoder.CopyFrom(encoder)
            embedded.kv_addresses.extend(record.kv_addresses)
        else:
            log.info("images.not_encoded", encoder=record.instance_id, outcome=outcome)
        self._prefill.send(Command(embedded=embedded))
