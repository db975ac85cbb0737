"""Decides which gateways a proxy should send a request to, best first.

Every gateway can serve every request. A region is a place whose processes are near each other. The
gateways in the region of the planned instances come first, because the answer's tokens come from
that region. Requests with equal keys are treated as one chat (`chat_key.py`). Each key puts the
gateways in an order of its own. The requests of the key go to the first gateway, which caches the
tokens of the chat. If that gateway has more than 1.25 times its share of the open requests, the
next one in the key's order takes them (Mirrokni et al.: consistent hashing with bounded loads).
Requests without a key go to the gateway with the fewest open requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

_SHARE: Final = 1.25  # a key's gateway takes at most this factor times the mean of open requests


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """A gateway that takes requests. `address` is `ip:port` of its HTTP port."""

    id: str
    address: str
    region: str = ""


@dataclass(frozen=True, slots=True)
class GatewayQuery:
    """A request to rank gateways for.

    `region` is the region of the planned instances. If it is empty, all gateways are equally near.
    `only` has the addresses to choose from. None means all.
    """

    key: bytes = b""
    region: str = ""
    only: Collection[str] | None = None


@dataclass(slots=True)
class GatewayRanking:
    _gateways: list[GatewayEndpoint] = field(default_factory=list)

    def see(self, gateways: Iterable[GatewayEndpoint]) -> None:
        """Replace the known gateways by `gateways`."""
        self._gateways = sorted(gateways, key=lambda g: g.id)

    def rank(
        self, query: GatewayQuery, num_open: Callable[[str], int]
    ) -> Sequence[GatewayEndpoint]:
        """The gateways for the query, best first. The result is empty if there are none.

        `num_open` returns the number of open requests of an address, as far as it is known.
        """
        only = query.only
        able = [g for g in self._gateways if only is None or g.address in only]
        near = [g for g in able if _is_near(g, query.region)]
        far = [g for g in able if not _is_near(g, query.region)]
        return [*_ordered(near, query.key, num_open), *_ordered(far, query.key, num_open)]


def _is_near(gateway: GatewayEndpoint, region: str) -> bool:
    return not region or gateway.region in (region, "")


def _ordered(
    gateways: Sequence[GatewayEndpoint], key: bytes, num_open: Callable[[str], int]
) -> list[GatewayEndpoint]:
    loads = {g.id: num_open(g.address) for g in gateways}
    if not key:
        return sorted(gateways, key=lambda g: (loads[g.id], g.id))
    most = _SHARE * (sum(loads.values()) + 1) / max(1, len(gateways))

    def order(gateway: GatewayEndpoint) -> tuple[bool, int, bytes]:
        is_full = loads[gateway.id] + 1 > most and loads[gateway.id] > 0
        return is_full, loads[gateway.id] if is_full else 0, _weight(key, gateway.id)

    return sorted(gateways, key=order)


def _weight(key: bytes, gateway_id: str) -> bytes:
    return hashlib.blake2b(gateway_id.encode(), key=key[:64], digest_size=8).digest()
