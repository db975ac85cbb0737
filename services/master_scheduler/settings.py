"""The environment of a master-scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from pdmesh.config import settings_config, shared
from pdmesh.core.placement.chat_affinity import MAX_CHATS, TTL_S
from pdmesh.net.oidc.settings import OidcSettings


class Settings(OidcSettings):
    model_config = settings_config("PDMESH_MASTER_SCHEDULER_")

    region: str = shared("", description="Region of this master")
    policy: Literal[
        "default",
        "round_robin",
        "least_connections",
        "shortest_queue",
        "mixed_pool",
        "cache_threshold",
        "kv_router",
        "weighted_sum",
    ] = Field("default", description="Policy that ranks instances; all but default are baselines")
    future_price: float = Field(
        6.0,
        ge=0,
        description="What a second of compute costs later requests, in seconds, if instances are "
        "busy half of the time; it is multiplied by used / (1 - used)",
    )
    balance_price: float = Field(
        10.0,
        ge=0,
        description="Cost of a request, in times of its whole prompt, at an instance whose recent "
        "work is twice the sum of the mean work and this prompt; a quarter where the chat is",
    )
    prefix_weight: float = Field(
        1.0,
        ge=0,
        description="For weighted_sum: weight of the share of the prompt that an instance holds "
        "(alpha)",
    )
    remote_weight: float = Field(
        0.5,
        ge=0,
        description="For weighted_sum: weight of the additional share that a peer's pool holds "
        "(beta)",
    )
    latency_weight: float = Field(
        3.0,
        ge=0,
        description="For weighted_sum: weight of the predicted latency, relative to the slowest "
        "instance (gamma)",
    )
    load_weight: float = Field(
        0.5, ge=0, description="For weighted_sum: weight of the share of slots in use"
    )
    chat_weight: float = Field(
        0.2,
        ge=0,
        description="For weighted_sum: bonus for the prefill that served the chat's last turn",
    )
    max_candidates: int = Field(8, ge=1, description="Most instances of each role in a plan")
    max_waiting: int = Field(
        4096,
        ge=0,
        description="Most requests of one scenario that wait, over all gateways; more are refused "
        "at once; 0: no limit",
    )
    ratio_window_s: float = Field(
        30.0,
        ge=1,
        description="Window of requests for one check of a scenario's P:D ratio; three agreeing "
        "windows change it",
    )
    chat_ttl_s: float = Field(
        TTL_S, gt=0, description="How long to remember which prefill served a chat"
    )
    max_chats: int = Field(MAX_CHATS, ge=1, description="Most chats that are remembered")
    max_blocks: int = Field(
        8_000_000, ge=1, description="Most index entries in memory, over all instances"
    )
    admin_token: SecretStr = shared(
        SecretStr(""),
        description="Token of callers that may change groups and instances; none: only callers on "
        "this machine may",
    )
    admin_token_file: Path | None = shared(
        None, description="File with the admin token, instead of admin_token"
    )
    keys_file: Path | None = Field(
        None,
        description="File of API keys (pdmesh keys); those with a role may call the admin API",
    )
    hash_secret: SecretStr = shared(
        SecretStr("pdmesh-development"),
        description="Key of the block hashes, equal on all services",
    )
    resync_s: float = Field(
        30.0,
        gt=0,
        description="Interval at which one instance, in turn, is compared with its snapshot",
    )
