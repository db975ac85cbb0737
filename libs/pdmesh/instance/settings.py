"""The settings that instances of all roles read from the environment.

Each service sets the prefix of the variables' names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from pdmesh.config import ServiceSettings, shared
from pdmesh.core.deadlines import (
    ENGINE_HUNG_S,
    ENGINE_SLOW_S,
    OUTBOX_STALL_S,
    TICKET_LEASE_S,
    TRANSFER_STALL_S,
    TRANSFER_TIMEOUT_S,
)
from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.core.instance.urgency import SchedulingPolicy
from pdmesh.core.kv.transfer.gpu_or_host import KvMemory
from pdmesh.core.kv.transfer.incoming_blocks import MAX_PULLS
from pdmesh.core.loading.weights_loader import WeightsLoader
from pdmesh.instance.json_option import EngineArgsOption
from pdmesh.instance.speculation_settings import SpeculationOption, SpeculationSettings

Engine = Literal["sim", "vllm"]


class InstanceSettings(ServiceSettings):
    engine: Engine = shared("vllm", description="Engine: vllm, or sim (no model, no torch)")
    model: str = shared("", description="Model name for clients; default: the model folder's name")
    model_dir: Path | None = shared(None, description="Folder of the model; sim needs none")
    dtype: str = shared(
        "", description="vLLM: number format; default: float32 on a CPU, the model's own otherwise"
    )
    kv_cache_dtype: str = shared(
        "auto",
        description="vLLM: number format of stored KV; auto: as computed; fp8 halves the bytes "
        "that move",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="vLLM: tensor-parallel ranks, of each pipeline stage"
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        description="vLLM: pipeline stages, each with some of the model's layers; for prefill, "
        "decode and fusion",
    )
    domain_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="vLLM: port to which the engines of a data-parallel domain connect, if this "
        "instance is its rank 0; 0 picks a free one",
    )
    kv_cache_bytes: int = Field(0, ge=0, description="vLLM: memory for KV; 0: 512 MiB")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="vLLM: most tokens computed per step; 0: 512 on a CPU (for short steps), and "
        "vLLM's own default on a GPU",
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="vLLM: most tokens that a decode proposes per step by prompt lookup; fewer in "
        "larger batches; 0: none. A shorter form of `speculation`",
    )
    speculation: SpeculationOption = shared(
        None,
        description='vLLM: how a decode proposes tokens: {"method": "prompt_lookup", "k": 4, '
        '"schedule": "adaptive"}; none: as speculative_tokens says',
    )
    speculative_acceptance: float = Field(
        0.6,
        ge=0,
        lt=1,
        description="Assumed share of proposed tokens that are right, until it is measured",
    )
    speculative_token_cost: float = Field(
        0.01,
        gt=0,
        description="Assumed cost of checking one proposed token, as a share of a step's fixed "
        "cost, until it is measured",
    )
    async_scheduling: AsyncScheduling = shared(
        AsyncScheduling.AUTO,
        description="vLLM: schedule a step while the one before it is computed; auto: where it "
        "pays",
    )
    engine_args: EngineArgsOption = shared(
        {},
        description='vLLM: more of its arguments, by vLLM\'s names: {"quantization": "awq"}; those '
        "that the mesh sets itself are refused",
    )
    scheduling_policy: SchedulingPolicy = shared(
        SchedulingPolicy.PRIORITY,
        description="Which request the engine serves first: priority, by the tenants' priorities; "
        "fcfs, by arrival alone",
    )
    weights_loader: WeightsLoader = shared(
        WeightsLoader.AUTO,
        description="vLLM: what reads the model's weights: file_order (one reader per node, file "
        "after file), vllm (vLLM's loader, each rank by itself), or auto: file_order if the model "
        "is on FUSE or a network file system",
    )
    enable_lora: bool = shared(
        False, description="Serve LoRA adapters (pdmesh adapters); costs memory for their slots"
    )
    max_loras: int = shared(4, ge=1, le=256, description="LoRA adapters loaded at once")
    max_lora_rank: int = shared(16, ge=1, le=512, description="Highest rank of a LoRA adapter")
    embedding_pool_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        description="Most bytes of image embeddings that an instance of the role encoder holds; "
        "the least recently used ones are evicted first",
    )
    pooling_convert: Literal["auto", "none", "embed", "classify"] = Field(
        "auto",
        description="vLLM: how an instance of the role pooling converts a model that generates "
        "text; auto: as vLLM chooses by the model's architecture",
    )
    group_id: str = shared("default", description="Group of this instance")
    scenario: str = shared("default", description="Scenario that its group serves")
    region: str = shared("", description="Region of this instance")
    rack: str = shared("", description="Rack within the region")
    model_cache_dir: Path | None = shared(
        None, description="Folder for copies of artefacts; none: artefacts are loaded in place"
    )
    peer_verify_s: float = shared(5.0, gt=0, description="Longest time for a KV probe to a peer")
    kv_memory: KvMemory = shared(
        KvMemory.AUTO,
        description="vLLM on a GPU: where KV waits and lands: device, host (page-locked), or auto: "
        "on the device if UCX can move it from there without the host (docs/gpu.md)",
    )
    require_rdma: bool = shared(
        False,
        description="Refuse to start unless UCX finds an RDMA device here and, on a GPU with "
        "KV_MEMORY auto or device, can move KV without the host's memory; peers are not checked",
    )
    num_slots: int = Field(8, ge=1, description="Requests served at once (b_p or b_d)")
    block_size: int = shared(64, ge=1, description="Tokens per KV block")
    max_model_len: int = shared(4096, ge=2, description="Most tokens of prompt and output together")
    num_kv_blocks: int = Field(
        0, ge=0, description="Sim: number of KV blocks; 0: room for all slots"
    )
    staging_bytes: int = Field(
        0, ge=0, description="Arena for outgoing KV; 0: computed from the slots"
    )
    landing_bytes: int = Field(
        0, ge=0, description="Arena for incoming KV; 0: computed from max_retrievals"
    )
    max_retrievals: int = Field(
        16,
        ge=1,
        description="Most requests at a decode whose KV has not arrived; further ones are refused",
    )
    max_pulls: int = Field(
        MAX_PULLS,
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
        None,
        description="Folder of the file store, preferably shared by all instances; none: no store",
    )
    kv_file_store_bytes: int = shared(
        4 << 30,
        gt=0,
        description="Quota of the file store; the least recently used blocks are evicted first",
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
    max_reserved_output: int = Field(
        0,
        ge=0,
        description="Answer tokens whose blocks are reserved at admission; 0: the whole answer",
    )
    # `core/deadlines.py` explains which of these times must be longer than which.
    ticket_lease_s: float = shared(
        TICKET_LEASE_S, gt=0, description="How long staged KV is held if it is not pulled"
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
        description="Longest time of a pull without any bytes, after which it ends: the link may "
        "be cut",
    )
    stall_s: float = shared(
        OUTBOX_STALL_S, gt=0, description="Disconnect a gateway that reads nothing for this long"
    )
    engine_slow_s: float = shared(
        ENGINE_SLOW_S,
        gt=0,
        description="Silence (no answer to a ping, no computed layer) that makes an engine suspect",
    )
    engine_hung_s: float = shared(
        ENGINE_HUNG_S,
        gt=0,
        description="Silence of the engine after which the instance ends itself, to be restarted",
    )
    devices: str = shared(
        "",
        description="The node's devices that the instance uses, separated by commas; default: "
        "CUDA_VISIBLE_DEVICES, else NVIDIA_VISIBLE_DEVICES, else its own id",
    )
    node_status_file: Path | None = shared(
        None, description="File with the node's status; default: STATE_DIR/run/node-status.json"
    )
    drain_s: float = shared(10.0, ge=0, description="Time for requests to finish at shutdown")
    sim_law: Literal["zero", "demo", "smollm2-cpu", "smollm2-padded", "slow-cpu"] = shared(
        "demo", description="Sim: law of the computing times"
    )
    sim_eos_period: int = shared(300, ge=0, description="Sim: one token in this many ends the text")
    sim_num_layers: int = shared(2, ge=1, description="Sim: number of KV layers")
    sim_token_bytes: int = shared(
        64, ge=8, multiple_of=8, description="Sim: bytes of KV per token and layer"
    )
    sim_seed: int = shared(
        1,
        ge=0,
        le=1 << 32,
        description="Sim: seed that stands for the model; another seed gives other answers",
    )
    sim_fail_every: int = shared(
        0, ge=0, description="Sim: one prompt in this many fails, as in a bad release; 0: none"
    )
    sim_image_tokens: int = shared(
        0, ge=0, le=4096, description="Sim: tokens of an image; 0: its model takes no images"
    )
    sim_pooling: Literal["embed", "classify"] = shared(
        "embed", description="Sim: what a pooling instance makes: vectors, or scores of pairs"
    )
    sim_dimensions: int = shared(
        64, ge=1, le=4096, description="Sim: dimensions of a pooling instance's vectors"
    )
    failpoint: str = shared("", description="Faults for tests: name=action[@n[+]],...")

    @field_validator("speculation")
    @classmethod
    def _speculation_is_given_once(
        cls, value: SpeculationSettings | None, info: ValidationInfo
    ) -> SpeculationSettings | None:
        if value is not None and info.data.get("speculative_tokens"):
            raise ValueError("speculative_tokens is set, too; use only k of speculation")
        return value
