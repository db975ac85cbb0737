"""The environment of a kv-cache-index."""

from __future__ import annotations

from pydantic import Field

from pdmesh.config import ServerUrl, ServiceSettings, settings_config, shared


class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_KV_CACHE_INDEX_")

    redis_url: ServerUrl = shared(
        "redis://127.0.0.1:6379", description="Redis or Valkey server that keeps the index"
    )
    redis_timeout_s: float = Field(
        0.25, gt=0, description="Longest wait for an answer from Redis, which then counts as away"
    )
    max_blocks: int = Field(
        8_000_000,
        ge=1,
        description="Most entries in memory, over all instances (50 to 230 bytes each; a block "
        "of several instances is stored once)",
    )
    resync_s: float = Field(
        30.0,
        gt=0,
        description="Interval at which one instance, in turn, is asked for a full snapshot",
    )
