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
    engine: Engine = shared("vllm", description="Engine: vllm, or sim (no model, no torch)")
    model: str = shared("", description="Model name for clients; default: the model folder's name")
    model_dir: Path | None = shared(None, description="Folder of the model; sim needs none")
    dtype: str = shared(
        "", description="vLLM: number format; default: float32 on a CPU, else the model's"
    )
    kv_cache_dtype: str = shared(
        "auto",
        description="vLLM: number format of stored KV; auto: as computed; fp8 halves what moves",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="vLLM: tensor-parallel ranks")
    kv_cache_bytes: int = Field(0, ge=0, description="vLLM: memory for KV; 0: 512 MiB")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="vLLM: most tokens computed per step; 0: 512 on a CPU, for short steps, vLLM's "
        "own on a GPU",
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="vLLM: most tokens that a decode proposes per step by prompt lookup; fewer in "
        "larger batches; 0: none",
    )
    speculative_acceptance: float = Field(
        0.6, ge=0, lt=1, description="Share of proposed tokens that are right, until measured"
    )
    speculative_token_cost: float = Field(
        0.01,
        gt=0,
        description="Cost of checking one proposed token, as a share of a step's fixed cost",
    )
    group_id: str = shared("default", description="Group of this instance")
    scenario: str = shared("default", description="Scenario its group serves")
    region: str = shared("", description="Region of this instance")
    rack: str = shared("", description="Rack within the region")
    model_cache_dir: Path | None = shared(
        None, description="Folder for copies of artefacts; none: they are loaded in place"
    )
    peer_verify_s: float = shared(5.0, gt=0, description="Longest time for a probe of KV to a peer")
    num_slots: int = Field(8, ge=1, description="Requests served at once (b_p or b_d)")
    block_size: int = shared(64, ge=1, description="Tokens per KV block")
    max_model_len: int = shared(
        4096, ge=2, description="Longest prompt and output together, tokens"
    )
    num_kv_blocks: int = Field(0, ge=0, description="KV blocks; 0: room for all slots (sim)")
    staging_bytes: int = Field(0, ge=0, description="Arena for outgoing KV; 0: by slots")
    landing_bytes: int = Field(0, ge=0, description="Arena for incoming KV; 0: by retrievals")
    max_retrievals: int = Field(
        16, ge=1, description="Requests at a decode whose KV has not come yet; more are refused"
    )
    max_pulls: int = Field(
        64,
        ge=1,
        description="Concurrent KV pulls at a decode, of at most 64 MiB together per sender; "
        "others wait",
    )
    max_waiting: int = Field(
        2, ge=0, description="Requests accepted beyond a decode's slots, to receive their KV early"
    )
    kv_host_pool_bytes: int = shared(
        0, ge=0, description="Host memory for evicted KV blocks, per rank; 0: none"
    )
    kv_file_store_dir: Path | None = shared(
        None, description="Folder of the file store, best shared by all instances; none: no store"
    )
    kv_file_store_bytes: int = shared(
        4 << 30, gt=0, description="Quota of the file store; least recently used blocks go first"
    )
    kv_peer_pools: bool = shared(
        True, description="Also use other instances' host pools, if this one has a pool or store"
    )
    kv_tier_owner_share: float = shared(
        1.0, gt=0, le=1, description="Share of host pool and file store that one tenant may fill"
    )
    kv_tier_timeout_s: float = shared(
        0.5, gt=0, description="Longest wait of a prompt for blocks from the tiers"
    )
    kv_tail_start: int = shared(
        208, ge=1, description="Sim: least tokens of a partial KV block to reuse"
    )
    kv_tail_step: int = shared(
        4, ge=0, description="Sim: steps of partial reuse, in tokens; 0: whole blocks only, as vLLM"
    )
    max_reserved_output: int = Field(
        0, ge=0, description="Answer tokens with blocks reserved up front; 0: the whole answer"
    )
    # `core/deadlines.py` shows how these nest.
    ticket_lease_s: float = shared(
        TICKET_LEASE_S, gt=0, description="How long staged KV is held unless it is pulled"
    )
    transfer_timeout_s: float = shared(
        TRANSFER_TIMEOUT_S,
        gt=0,
        description="Longest time for one pull of KV, and for its wait before; shorter than the "
        "gateways' STALL_S, so that the decode reports the cause",
    )
    transfer_stall_s: float = shared(
        TRANSFER_STALL_S,
        gt=0,
        description="Of that, longest time without any bytes: the link may be cut",
    )
    stall_s: float = shared(
        OUTBOX_STALL_S, gt=0, description="Disconnect a gateway that reads nothing for so long"
    )
    engine_slow_s: float = shared(
        ENGINE_SLOW_S,
        gt=0,
        description="Silence (no ping answered, no layer computed) that makes an engine suspect",
    )
    engine_hung_s: float = shared(
        ENGINE_HUNG_S,
        gt=0,
        description="Silence of the engine after which the instance ends, to be restarted",
    )
    devices: str = shared(
        "",
        description="The node's devices that it computes on, separated by commas; default: "
        "CUDA_VISIBLE_DEVICES, else its own id",
    )
    node_status_file: Path | None = shared(
        None, description="File with the node's status; default: STATE_DIR/run/node-status.json"
    )
    drain_s: float = shared(
        10.0, ge=0, description="Time for requests to finish when asked to stop"
    )
    sim_law: Literal["zero", "demo", "smollm2-cpu", "smollm2-padded", "slow-cpu"] = shared(
        "demo", description="Sim: law of its computing times"
    )
    sim_eos_period: int = shared(300, ge=0, description="Sim: one token in so many ends the text")
    sim_num_layers: int = shared(2, ge=1, description="Sim: layers of its KV")
    sim_token_bytes: int = shared(
        64, ge=8, multiple_of=8, description="Sim: bytes of KV per token and layer"
    )
    sim_seed: int = shared(
        1, ge=0, le=1 << 32, description="Sim: which model it is; another seed, other answers"
    )
    sim_fail_every: int = shared(
        0, ge=0, description="Sim: one prompt in so many fails, as in a bad release; 0: none"
    )
    failpoint: str = shared("", description="Faults for tests: name=action[@n[+]],...")
