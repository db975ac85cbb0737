"""The environment of a master-scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from pdmesh.config import ServiceSettings, settings_config, shared


class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_MASTER_SCHEDULER_")

    region: str = shared("", description="Region this master runs in")
    policy: Literal[
        "default",
        "round_robin",
        "least_connections",
        "shortest_queue",
        "mixed_pool",
        "cache_threshold",
        "kv_router",
    ] = Field("default", description="How instances are ranked; the others are baselines")
    prefix_weight: float = Field(
        1.0, ge=0, description="Weight of the share of the prompt that an instance holds (alpha)"
    )
    remote_weight: float = Field(
        0.5, ge=0, description="Weight of the share of it that a peer holds beyond that (beta)"
    )
    latency_weight: float = Field(
        3.0, ge=0, description="Weight of the predicted latency, relative to the slowest (gamma)"
    )
    load_weight: float = Field(
        0.5, ge=0, description="Weight of the share of its slots that are used"
    )
    chat_weight: float = Field(
        0.2, ge=0, description="Bonus of the prefill that served the chat's last turn"
    )
    max_candidates: int = Field(8, ge=1, description="Instances of each kind in a plan")
    max_waiting: int = Field(
        4096,
        ge=0,
        description="Requests of one scenario that wait at all gateways; who comes then is refused "
        "at "
        "once. 0: no limit",
    )
    ratio_window_s: float = Field(
        30.0,
        ge=1,
        description="Requests of so long make one look at a scenario's P:D ratio; three that agree "
        "change "
        "it",
    )
    chat_ttl_s: float = Field(600.0, gt=0, description="Remember where a chat was for so long")
    max_chats: int = Field(100_000, ge=1, description="Chats remembered at most")
    max_blocks: int = Field(
        8_000_000, ge=1, description="Index entries in memory over all instances"
    )
    admin_token: SecretStr = shared(
        SecretStr(""),
        description="Who shows it may change groups and instances; none: only calls from this "
        "machine may",
    )
    admin_token_file: Path | None = shared(
        None, description="File that holds the admin token, instead of admin_token"
    )
    hash_secret: SecretStr = shared(
        SecretStr("pdmesh-development"),
        description="Key of the block hashes, equal on all services",
    )
    resync_s: float = Field(
        30.0, gt=0, description="Compare one instance in turn with its snapshot this often"
    )
