"""Configures and opens an instance's tiers: its host pool, its file store, its peers' pools."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pdmesh.core.kv.tiers.load_plan import CostBook
from pdmesh.kv.tiers.file_format import identity_of
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.file_tier import FileTier
from pdmesh.kv.tiers.host_pool import HostPool
from pdmesh.kv.tiers.report import TierCounts
from pdmesh.kv.tiers.stack import TierStack

# The size of the pool if only a file store is configured: the store's blocks pass through a pool.
LEAST_POOL_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Bytes are per rank. All tiers are off by default."""

    host_pool_bytes: int = 0
    file_store_dir: str = ""  # empty for no file store
    file_store_bytes: int = 0  # quota of the whole directory
    owner_share: float = 1.0  # the share of each tier that one tenant may fill
    timeout_s: float = 0.5  # longest wait of a request for its blocks
    uses_peers: bool = False

    @property
    def is_on(self) -> bool:
        return bool(self.host_pool_bytes or self.file_store_dir)

    @property
    def fetches_from_peers(self) -> bool:
        return self.uses_peers and self.is_on

    @property
    def has_host_pool(self) -> bool:
        return self.is_on

    @property
    def pool_bytes(self) -> int:
        return self.host_pool_bytes or LEAST_POOL_BYTES

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def open_tiers(
    config: TierConfig,
    *,
    model_fingerprint: str,
    block_bytes: int,
    rank: int = 0,
    num_ranks: int = 1,
    costs: CostBook | None = None,
) -> TierStack:
    """Open the tiers of one rank. `block_bytes` is the size of a block over all layers of the rank.

    The caller must use and close the TierStack on one event loop.
    """
    counts = TierCounts()
    pool = HostPool(config.pool_bytes, block_bytes, owner_share=config.owner_share)
    files = None
    if config.file_store_dir:
        store = FileStore(
            Path(config.file_store_dir),
            identity_of(model_fingerprint, rank, num_ranks),
            block_bytes,
            config.file_store_bytes,
            time.time,
            owner_share=config.owner_share,
        )
        files = FileTier(store, pool, counts, time.monotonic)
    return TierStack(pool, counts, time.monotonic, files=files, costs=costs)
