"""Other instances' host pools, as a tier: who holds which blocks, and how their bytes get here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdmesh.kv.transport import ByteArray


@dataclass(frozen=True, slots=True)
class PeerHolding:
    """A peer whose host pool holds blocks of a chain: those of the mask `held`."""

    instance_id: str
    incarnation: int
    address: str
    held: int


class PeerPools(Protocol):
    async def find(self, names: Sequence[bytes]) -> Sequence[PeerHolding]:
        """Who holds which of the names. Never raises; an empty answer where nothing is known."""
        ...

    async def load(
        self, peer: PeerHolding, names: Sequence[bytes], targets: Sequence[ByteArray]
    ) -> Sequence[bytes]:
        """Fill targets with the longest prefix of the names that the peer has, and return their checksums, verified.

        Returns when no late write can reach a target any more. Never raises, and is cancelled at the end only.
        """
        ...
