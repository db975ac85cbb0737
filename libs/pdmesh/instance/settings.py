"""What `prefill` and `decode` read from the environment; each service adds its prefix and role."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pdmesh.config import ServiceSettings, shared
from pdmesh.core.deadlines import (
    ENGINE_HUNG_S,
    ENGINE_SLOW_S,
    OUTBOX_STALL_S,
    TICKET_LEASE_S,
    TRANSFER_STALL_S,
    TRANSFER_TIMEOUT_S,
)

Engine = Literal["sim", "vllm"]


class InstanceSettings(ServiceSettings):
    engine: Engine = shared("vllm", description="What computes: vllm, or sim (no model, no torch)")
    model: str = shared("", description="Name clients use; default: the model folder's name")
    model_dir: Path | None = shared(
        None, description="Folder of the model; sim computes without it"
    )
    dtype: str = shared(
        "", description="vLLM: number format; default: float32 on a CPU, else the model's"
    )
    kv_cache_dtype: str = shared(
        "auto",
        description="vLLM: number format of stored KV; auto: as computed; fp8 halves what moves",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="vLLM: ranks one model is split over")
    kv_cache_bytes: int = Field(0, ge=0, description="vLLM: memory for KV; 0: 512 MiB")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="vLLM: tokens computed per step at most; 0: 512 on a CPU, so that no step "
        "takes long, "
        "vLLM's own on a GPU",
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="vLLM: tokens a decode proposes per step at most, looked up in the prompt; "
        "fewer in "
        "larger batches. 0: none",
    )
    speculative_acceptance: float = Field(
        0.6, ge=0, lt=1, description="Chance that a proposed token is right"
    )
    speculative_token_cost: float = Field(
        0.01,
        gt=0,
        description="Cost of checking one proposed token, as a share of a step's fixed cost",
    )
    group_id: str = shared("default", description="Group this instance belongs to")
    scenario: str = shared("default", description="Scenario its group serves")
    region: str = shared("", description="Region this instance runs in")
    rack: str = shared("", description="Rack within the region")
    model_cache_dir: Path | None = shared(
        None, description="Folder for copies of artefacts; none: they are loaded where they lie"
    )
    peer_verify_s: float = shared(
        5.0, gt=0, description="Longest time a probe of the KV connection to a peer may take"
    )
    num_slots: int = Field(8, ge=1, description="Requests served at once (b_p or b_d)")
    block_size: int = shared(64, ge=1, description="Tokens per KV block")
    max_model_len: int = shared(
        4096, ge=2, description="Longest prompt and output together, tokens"
    )
    num_kv_blocks: int = Field(0, ge=0, description="KV blocks; 0: room for all slots (sim)")
    staging_bytes: int = Field(0, ge=0, description="Arena for KV on its way out; 0: by slots")
    landing_bytes: int = Field(0, ge=0, description="Arena for KV on its way in; 0: by retrievals")
    max_retrievals: int = Field(
        16, ge=1, description="Requests at a decode whose KV has not come yet; more are refused"
    )
    max_pulls: int = Field(
        64,
        ge=1,
        description="KV pulls at once at a decode, 64 MiB together of each sender; others wait",
    )
    max_waiting: int = Field(
        2, ge=0, description="Requests a decode takes beyond its slots: their KV comes meanwhile"
    )
    kv_host_pool_bytes: int = shared(
        0, ge=0, description="Host memory for KV blocks the engine evicts, per rank; 0: none"
    )
    kv_file_store_dir: Path | None = shared(
        None, description="Folder for KV blocks, best shared by all instances; none: no file store"
    )
    kv_file_store_bytes: int = shared(
        4 << 30, gt=0, description="Quota of the file store's folder; the least recently used go"
    )
    kv_peer_pools: bool = shared(
        True, description="Ask other instances' host pools too, where this one has a pool or store"
    )
    kv_tier_owner_share: float = shared(
        1.0, gt=0, le=1, description="Share of host pool and file store that one tenant may fill"
    )
    kv_tier_timeout_s: float = shared(
        0.5, gt=0, description="A prompt waits so long at most for blocks from the tiers"
    )
    kv_tail_start: int = shared(
        208, ge=1, description="Sim: beginnings of KV blocks are reused from so many tokens on"
    )
    kv_tail_step: int = shared(
        4, ge=0, description="Sim: and each so many tokens further; 0: whole blocks alone, as vLLM"
    )
    max_reserved_output: int = Field(
        0, ge=0, description="Tokens of an answer that get KV blocks up front; 0: the whole answer"
    )
    # `core/deadlines.py` shows how these nest.
    ticket_lease_s: float = shared(
        TICKET_LEASE_S, gt=0, description="Staged KV is held so long unless pulled"
    )
    transfer_timeout_s: float = shared(
        TRANSFER_TIMEOUT_S,
        gt=0,
        description="Longest time one pull of KV may take from its turn, or wait for its turn; "
        "shorter "
        "than the gateways' STALL_S, so that the decode says why",
    )
    transfer_stall_s: float = shared(
        TRANSFER_STALL_S,
        gt=0,
        description="Of that, longest time without any KV: the link may be cut",
    )
    stall_s: float = shared(
        OUTBOX_STALL_S, gt=0, description="A gateway that reads nothing for so long is cut"
    )
    engine_slow_s: float = shared(
        ENGINE_SLOW_S,
        gt=0,
        description="An engine that answers no ping and computes no layer for so long is suspect",
    )
    engine_hung_s: float = shared(
        ENGINE_HUNG_S,
        gt=0,
        description="After so long it is given up: the instance ends, to be started anew",
    )
    devices: str = shared(
        "",
        description="Names of the node's devices it computes on, by commas; default: "
        "CUDA_VISIBLE_DEVICES, else its own id",
    )
    node_status_file: Path | None = shared(
        None,
        description="The node's status for its instances; default: STATE_DIR/run/node-status.json",
    )
    drain_s: float = shared(10.0, ge=0, description="Time running requests get when asked to stop")
    sim_law: Literal["zero", "demo", "smollm2-cpu", "smollm2-padded", "slow-cpu"] = shared(
        "demo", description="Sim: law of the time it takes"
    )
    sim_eos_period: int = shared(300, ge=0, description="Sim: one token in so many ends the text")
    sim_num_layers: int = shared(2, ge=1, description="Sim: layers of its KV")
    sim_token_bytes: int = shared(
        64, ge=8, multiple_of=8, description="Sim: bytes of KV per token and layer"
    )
    sim_fail_every: int = shared(
        0, ge=0, description="Sim: one prompt in so many fails, as of a bad release; 0: none"
    )
    failpoint: str = shared("", description="Faults for tests: name=action[@n[+]],...")
