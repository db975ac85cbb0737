"""Checks pins, names their blocks, and bounds their share of an instance's KV stores (S78, S96).

A pin is an operator's order to keep the KV of a prefix, which many prompts begin with. A pin holds
block names, not tokens. The names are the keyed, chained hashes of the prefix's full blocks. They
differ by model fingerprint, which is equal for engines that may exchange KV. So a pin has one set
of names for each fingerprint in use (ADR 0022). Pins take cache from all other prompts, so their
number, length and time are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.kv.prefix.block_hash import block_hashes, tenant_root
from pdmesh.errors import InvalidRequest

MAX_PINS: Final = 64
MAX_BLOCKS: Final = 2048  # of all pins together, under one fingerprint
PINNED_SHARE: Final = 0.5  # of an instance's host pool, and of its file store
MIN_TTL_S: Final = 10
MAX_TTL_S: Final = 90 * 86_400
_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The blocks of one pin, as an instance receives them.

    Only the file store reads `until`: it keeps the blocks until this Unix time, in seconds.
    """

    names: tuple[bytes, ...]
    owner: bytes  # made by `core.kv.tiers.owner`
    until: float


@dataclass(frozen=True, slots=True)
class Cut:
    """How instances of one fingerprint cut prompts into blocks."""

    model_fingerprint: str
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class WantedPin:
    """An operator's request for a pin. Raises InvalidRequest if a field is invalid."""

    pin_id: str
    tenant: str
    cache_salt: str
    token_ids: tuple[int, ...]
    ttl_s: int

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.pin_id):
            raise InvalidRequest("must match [a-z0-9][a-z0-9-]{0,62}", field="pin_id")
        if not self.tenant:
            raise InvalidRequest("name the tenant whose prompts begin with it", field="tenant")
        if not self.token_ids:
            raise InvalidRequest("the prefix is empty", field="prefix_token_ids")
        if not MIN_TTL_S <= self.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"must be {MIN_TTL_S} to {MAX_TTL_S} s", field="ttl_s")

    def roots(self, secret: bytes, cuts: Iterable[Cut]) -> dict[Cut, bytes]:
        """For each cut, the key under which this tenant's blocks are hashed."""
        return {
            cut: tenant_root(secret, self.tenant, self.cache_salt, cut.model_fingerprint)
            for cut in cuts
        }

    def names(self, root: bytes, cut: Cut) -> tuple[bytes, ...]:
        """The names of the full blocks. Raises InvalidRequest if there are none or too many."""
        if len(self.token_ids) < cut.block_size:
            raise InvalidRequest(
                f"{len(self.token_ids)} tokens are less than a block of {cut.block_size}",
                field="prefix_token_ids",
            )
        if len(self.token_ids) // cut.block_size > MAX_BLOCKS:
            raise InvalidRequest(
                f"at most {MAX_BLOCKS * cut.block_size} tokens", field="prefix_token_ids"
            )
        return tuple(block_hashes(root, self.token_ids, cut.block_size))


def pinned_within(prefixes: Sequence[PinnedPrefix], num_blocks: int) -> dict[bytes, PinnedPrefix]:
    """The blocks that a store of `num_blocks` keeps for pins, each with its pin.

    Earlier pins take precedence. Pinned blocks beyond `PINNED_SHARE` are treated like ordinary
    blocks.
    """
    by_name = {name: prefix for prefix in prefixes for name in prefix.names}
    return {name: by_name[name] for name in list(by_name)[: int(PINNED_SHARE * num_blocks)]}


def check_room(
    pin_id: str, num_new: Mapping[str, int], num_held: Mapping[str, Mapping[str, int]]
) -> None:
    """Raise InvalidRequest unless the pin `pin_id` fits beside the other pins.

    `num_new` has the number of the pin's blocks by fingerprint. `num_held` has the same numbers for
    each existing pin, by pin id.
    """
    others = {other: blocks for other, blocks in num_held.items() if other != pin_id}
    if len(others) >= MAX_PINS:
        raise InvalidRequest(
            f"there are {len(others)} pins, which is the most: remove one",
            reason="TOO_MANY_PINS",
            field="pin_id",
        )
    for fingerprint, num_blocks in num_new.items():
        num_others = sum(blocks.get(fingerprint, 0) for blocks in others.values())
        if num_others + num_blocks > MAX_BLOCKS:
            raise InvalidRequest(
                f"its {num_blocks} blocks are too many: {num_others} of {MAX_BLOCKS} are pinned",
                reason="TOO_MANY_PINS",
                field="prefix_token_ids",
            )
