"""Manages pins at the leading master: adds and removes them, and ends expired ones.

A pin is an operator's order to keep the KV of a prefix, the beginning of a prompt. The prefix is
given as tokens. This module turns the tokens into names of KV blocks, once for each fingerprint in
use. A fingerprint identifies a model and a layout of its KV. The bucket in NATS stores these names,
but no tokens. Instances read the bucket directly, so a pin does not depend on any master. Every
master's index of blocks evicts the pinned names last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from pdmesh.core.kv.prefix.block_hash import tokens_from_bytes
from pdmesh.core.kv.prefix.pins import Cut, WantedPin, check_room
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.errors import InvalidRequest, MeshError, ModelNotFound, NotLeader, Unavailable
from pdmesh.events.v1.events_pb2 import PinChanged
from pdmesh.kv.index.pinned import all_names
from pdmesh.net import subjects
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1 import admin_service_pb2 as pb

log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0


class Pins:
    """Keeps the pins at every master. Only the leader changes them.

    `leadership` returns whether this process leads now, and its epoch. `secret` is the key of the
    block names, which all gateways use as well.
    """

    def __init__(
        self,
        board: Board[pb.Pin],
        index: PrefixIndex,
        link: MeshLink,
        secret: bytes,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the wall clock, so that all masters agree when a pin ends."""
        self._board, self._index = board, index
        self._view, self._publisher, self._secret = link.view, link.publisher, secret
        self._leadership, self._clock = leadership, clock
        self._pins: BoardView[pb.Pin] | None = None

    @property
    def known(self) -> Mapping[str, pb.Pin]:
        """The pins by id."""
        return self._pins.known if self._pins is not None else {}

    async def run(self) -> None:
        """Runs until cancelled."""
        self._pins = self._board.watch(lambda _: self._spare(), lambda _: self._spare())
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                try:
                    await self.round()
                except MeshError as exc:
                    log.info("pins.not_now", reason=exc.reason, error=exc.message)
                except Exception:  # a bug here must not end the planning of requests
                    log.exception("pins.bug")
        finally:
            await self._pins.close()

    async def round(self) -> None:
        """If this master leads, rewrite pins that the bucket has lost (F21), and end expired pins.

        Raises MeshError. The next round then tries again.
        """
        is_leader, epoch = self._leadership()
        if not is_leader or self._pins is None or not self._pins.is_current:
            return
        for pin_id in sorted(self._pins.missing):
            await self._write(self._pins.known[pin_id], epoch)
            log.warning("pins.restored", pin_id=pin_id)
        now = self._clock()
        for pin in [pin for pin in self.known.values() if pin.until.ToMicroseconds() / 1e6 <= now]:
            await self._forget(pin, epoch, "expired")

    async def add(self, request: pb.AddPinRequest, epoch: int) -> pb.PinState:
        """Add a pin, or replace the pin with this id.

        Raises InvalidRequest, ModelNotFound, Unavailable, NotLeader, VersionConflict. After
        Unavailable, the pin may have been stored, and the call may be repeated. After any other
        error, nothing has changed.
        """
        pins = self._opened()
        wanted = _wanted(request)
        model, cuts = self._cuts(request.model, request.scenario)
        pin = pb.Pin(
            pin_id=wanted.pin_id,
            model=model,
            tenant=wanted.tenant,
            scenario=request.scenario,
            num_tokens=len(wanted.token_ids),
            reason=request.reason,
        )
        for cut, root in wanted.roots(self._secret, cuts).items():
            names, owner = wanted.names(root, cut), owner_of(root.hex())
            pin.blocks.add(model_fingerprint=cut.model_fingerprint, owner=owner, names=names)
        held = {pin_id: _blocks_of(other) for pin_id, other in pins.known.items()}
        check_room(pin.pin_id, _blocks_of(pin), held)
        now = self._clock()
        pin.since.FromMicroseconds(round(now * 1e6))
        pin.until.FromMicroseconds(round((now + wanted.ttl_s) * 1e6))
        change = "replaced" if pin.pin_id in pins.known else "added"
        await self._write(pin, epoch)
        log.info("pins.added", pin_id=pin.pin_id, num_tokens=pin.num_tokens, ttl_s=wanted.ttl_s)
        await self._tell(pin, change)
        return self._state(pin)

    async def remove(self, pin_id: str, epoch: int) -> None:
        """Remove a pin.

        Raises InvalidRequest if there is no pin with this id. Also raises Unavailable, NotLeader or
        VersionConflict.
        """
        pin = self._opened().known.get(pin_id)
        if pin is None:
            raise InvalidRequest(f"there is no pin {pin_id}", field="pin_id")
        await self._forget(pin, epoch, "removed")

    def states(self) -> list[pb.PinState]:
        """All pins, with the instances whose host pools hold their blocks.

        Raises Unavailable while the pins cannot be read or may be outdated.
        """
        known = self._opened().known
        return [self._state(known[pin_id]) for pin_id in sorted(known)]

    # -- reading ----------------------------------------------------------------------------------

    def _cuts(self, model: str, scenario: str) -> tuple[str, list[Cut]]:
        """The requested model, and the ways in which its instances cut a prompt into blocks."""
        records = [r for r in self._view.records.values() if r.model_fingerprint and r.block_size]
        models = sorted({r.model for r in records})
        if not model and len(models) > 1:
            raise InvalidRequest(f"choose a model: {', '.join(models)}", field="model")
        model = model or (models[0] if models else "")
        if model not in models:
            raise ModelNotFound(f"no instance has {model or 'a model'} now", field="model")
        cuts = {
            Cut(r.model_fingerprint, r.block_size)
            for r in records
            if r.model == model and scenario in ("", r.scenario)
        }
        if not cuts:
            raise InvalidRequest(f"no instance serves {scenario} with {model}", field="scenario")
        return model, sorted(cuts, key=lambda cut: cut.model_fingerprint)

    def _state(self, pin: pb.Pin) -> pb.PinState:
        state = pb.PinState(
            pin_id=pin.pin_id,
            model=pin.model,
            tenant=pin.tenant,
            scenario=pin.scenario,
            num_tokens=pin.num_tokens,
            reason=pin.reason,
            since=pin.since,
            until=pin.until,
        )
        for blocks in pin.blocks:
            found = self._index.match(blocks.names, Tier.HOST)
            coverage = state.coverage.add(
                model_fingerprint=blocks.model_fingerprint, num_blocks=len(blocks.names)
            )
            for instance_id in sorted(found):
                coverage.holders.add(instance_id=instance_id, num_blocks=found[instance_id])
        named = {blocks.model_fingerprint for blocks in pin.blocks}
        for fingerprint in sorted(self._fingerprints(pin) - named):
            state.coverage.add(model_fingerprint=fingerprint)
        return state

    def _fingerprints(self, pin: pb.Pin) -> set[str]:
        """The fingerprints of the instances to which the pin applies."""
        return {
            record.model_fingerprint
            for record in self._view.records.values()
            if record.model == pin.model
            and record.model_fingerprint
            and pin.scenario in ("", record.scenario)
        }

    def _spare(self) -> None:
        self._index.pin(all_names(self.known.values()))

    # -- writing ----------------------------------------------------------------------------------

    async def _write(self, pin: pb.Pin, epoch: int) -> None:
        pins = self._opened()
        self._check_leadership(epoch)
        revision = await self._board.write(pin.pin_id, pin, last=pins.revision(pin.pin_id))
        pins.wrote(pin.pin_id, pin, revision)

    async def _forget(self, pin: pb.Pin, epoch: int, change: str) -> None:
        pins = self._opened()
        self._check_leadership(epoch)
        revision = await self._board.forget(pin.pin_id, last=pins.revision(pin.pin_id))
        pins.wrote(pin.pin_id, None, revision)
        log.info("pins.ended", pin_id=pin.pin_id, change=change)
        await self._tell(pin, change)

    async def _tell(self, pin: pb.Pin, change: str) -> None:
        event = PinChanged(
            pin_id=pin.pin_id,
            change=change,
            model=pin.model,
            tenant=pin.tenant,
            scenario=pin.scenario,
            num_tokens=pin.num_tokens,
            until=pin.until,
        )
        await self._publisher.publish(subjects.kv_pin(pin.pin_id), event)

    def _opened(self) -> BoardView[pb.Pin]:
        if self._pins is None or not self._pins.is_current:
            raise Unavailable("the pins are not known now: NATS is away, or has just come back")
        return self._pins

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader("this master has just lost the lead; nothing was changed")


def _wanted(request: pb.AddPinRequest) -> WantedPin:
    try:
        tokens = tokens_from_bytes(request.prefix_token_ids)
    except ValueError as exc:
        raise InvalidRequest("must be a list of uint32", field="prefix_token_ids") from exc
    return WantedPin(
        request.pin_id, request.tenant, request.cache_salt, tuple(tokens), request.ttl_s
    )


def _blocks_of(pin: pb.Pin) -> dict[str, int]:
    """How many blocks the pin has, by fingerprint."""
    return {blocks.model_fingerprint: len(blocks.names) for blocks in pin.blocks}
