"""Makes an instance's engine from its settings: vLLM, or the simulated engine (sim).

vLLM is imported only if the settings choose vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.core.instance.engine_args import EngineArgs
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.instance.urgency import SchedulingPolicy
from pdmesh.core.kv.tiers.load_plan import CostBook
from pdmesh.core.kv.transfer.gpu_or_host import KvMemory, NoSuchPath, decide_path
from pdmesh.core.kv.transfer.incoming_blocks import MAX_PULLS
from pdmesh.core.loading.weights_loader import WeightsLoader
from pdmesh.core.model import DomainRank
from pdmesh.core.speculation.proposal_length import NO_SPECULATION, Speculation
from pdmesh.engine.base import Engine
from pdmesh.engine.sim.config import SimConfig
from pdmesh.engine.sim.encoding.engine import SimEncoderConfig, SimEncoderEngine
from pdmesh.engine.sim.engine import SimEngine
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.sim.pooling import SimPoolingConfig, SimPoolingEngine
from pdmesh.engine.sim.vocabulary import IMAGE_ID
from pdmesh.engine.step_time_laws import LAWS
from pdmesh.errors import EngineMisconfigured, KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.types import AgentEvent, AgentIdentity
from pdmesh.kv.agent.wire import VERSION as KV_WIRE_VERSION
from pdmesh.kv.embeddings.pool import EmbeddingPool
from pdmesh.kv.tiers.config import TierConfig, open_tiers
from pdmesh.kv.tiers.peers import FindHolders, PoolSource
from pdmesh.kv.tiers.stack import TierStack
from pdmesh.kv.transport.base import KvTransport

SIM_MAX_IMAGES: Final = 8  # in a prompt


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings from which an engine is made.

    Sizes in bytes are per rank. A size of 0 means a default that may depend on other settings. A
    comment "vLLM" marks a setting that the sim ignores.
    """

    engine: str  # sim or vllm
    instance_id: str
    incarnation: int
    model: str
    model_dir: Path | None
    num_slots: int
    block_size: int
    max_model_len: int
    num_kv_blocks: int
    staging_bytes: int
    landing_bytes: int
    max_retrievals: int
    ticket_lease_s: float
    sends_kv: bool
    receives_kv: bool
    kv_host: str = "127.0.0.1"  # a loopback address keeps KV on this machine
    kv_memory: KvMemory = KvMemory.AUTO  # on a GPU (vLLM); elsewhere, DEVICE is refused
    requires_rdma: bool = False
    group_id: str = ""  # KV is handed over only within the group
    dtype: str = ""  # vLLM
    kv_cache_dtype: str = "auto"  # vLLM
    tensor_parallel_size: int = 1  # vLLM
    pipeline_parallel_size: int = 1  # vLLM
    domain: DomainRank | None = None  # vLLM: the instance's rank in a data-parallel domain
    kv_cache_bytes: int = 0  # vLLM
    max_num_batched_tokens: int = 0  # vLLM
    speculation: Speculation = NO_SPECULATION  # vLLM
    async_scheduling: AsyncScheduling = AsyncScheduling.AUTO  # vLLM
    weights_loader: WeightsLoader = WeightsLoader.AUTO  # vLLM
    engine_args: EngineArgs = field(default_factory=dict)  # more arguments for vLLM
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    max_adapters: int = 0  # LoRA adapters loaded at once; 0: the engine takes no adapters
    max_adapter_rank: int = 16
    # vLLM: the SHA-256 of each file in the model's folder, by name, if the files are verified.
    file_digests: Mapping[str, str] = field(default_factory=dict)
    failpoint: str = ""  # vLLM: the failpoint in vLLM's workers, see failpoints.py
    tiers: TierConfig = field(default_factory=TierConfig)
    max_pulls: int = MAX_PULLS  # the most pulls of KV at once
    sim_law: str = "demo"
    sim_eos_period: int = 300
    sim_num_layers: int = 2
    sim_token_bytes: int = 64  # bytes of KV per token and layer
    sim_seed: int = 1
    sim_fail_every: int = 0
    sim_image_tokens: int = 0  # tokens of each image; 0: the sim model takes no images
    is_encoder: bool = False  # the instance makes embeddings of images for prefills
    embedding_pool_bytes: int = 256 << 20  # memory for the embeddings that an encoder holds
    is_pooling: bool = False  # the instance makes vectors or scores of whole texts
    pooling_convert: str = "auto"  # vLLM: how to convert a generative model for pooling
    sim_pooling: str = "embed"
    sim_dimensions: int = 64


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    staging_bytes: int
    landing_bytes: int


def build_engine(settings: EngineSettings, find_holders: FindHolders | None = None) -> BuiltEngine:
    """Make an engine that is not started yet. Raises EngineMisconfigured for impossible settings.

    `find_holders` finds the peers that hold given KV blocks in host memory. If it is None, no peer
    is asked for blocks.
    """
    if settings.pipeline_parallel_size > 1 and (settings.is_pooling or settings.is_encoder):
        raise EngineMisconfigured(
            "pipeline_parallel_size: only instances that generate are pipelines (docs/gpu.md)",
            reason="BAD_OPTION",
            field="pipeline_parallel_size",
        )
    match settings.engine:
        case "sim" if settings.is_pooling:
            return build_sim_pooling(settings)
        case "vllm" if settings.is_pooling:
            return _build_vllm_pooling(settings)
        case "sim" if settings.is_encoder:
            return build_sim_encoder(settings, lambda: _ucx(settings))
        case "vllm" if settings.is_encoder:
            return _build_vllm_encoder(settings)
        case "sim":
            _check_kv_path(settings)
            return build_sim(settings, lambda: _ucx(settings), find_holders)
        case "vllm":
            return _build_vllm(settings, find_holders)
        case other:
            raise EngineMisconfigured(f"unknown engine {other!r}; choose sim or vllm")


def sim_fingerprint(params: SimParams) -> str:
    """A hash of everything that changes the bytes or the layout of KV.

    Two instances exchange KV only if their fingerprints are equal.
    """
    identity = f"sim/{params!r}/uint64/kv{KV_WIRE_VERSION}"
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def build_sim(
    settings: EngineSettings,
    make_transport: Callable[[], KvTransport],
    find_holders: FindHolders | None = None,
) -> BuiltEngine:
    law = _law(settings)
    params = sim_params(settings)
    blocks_per_prompt = -(-settings.max_model_len // settings.block_size)
    prompt_bytes = blocks_per_prompt * params.num_layers * params.block_bytes
    fingerprint = sim_fingerprint(params)
    staging_bytes = settings.sends_kv * (
        settings.staging_bytes or settings.num_slots * prompt_bytes
    )
    landing_bytes = settings.receives_kv * (
        settings.landing_bytes or settings.max_retrievals * prompt_bytes
    )
    identity = AgentIdentity(
        settings.instance_id, settings.incarnation, fingerprint, group_id=settings.group_id
    )
    tiers = _sim_tiers(settings, params, fingerprint) if settings.tiers.is_on else None

    def make_agent(on_event: Callable[[AgentEvent], None]) -> KvAgent:
        return KvAgent(
            make_transport(),
            identity,
            host_memory(
                staging_bytes,
                landing_bytes,
                PoolSource(tiers.pool, tiers.counts) if tiers is not None else None,
            ),
            on_event,
        )

    config = SimConfig(
        instance_id=settings.instance_id,
        incarnation=settings.incarnation,
        model=settings.model,
        model_fingerprint=fingerprint,
        num_slots=settings.num_slots,
        params=params,
        law=law,
        num_kv_blocks=settings.num_kv_blocks or (settings.num_slots + 1) * blocks_per_prompt,
        ticket_lease_s=settings.ticket_lease_s,
        tier_timeout_s=settings.tiers.timeout_s,
        max_pulls=settings.max_pulls,
        scheduling_policy=settings.scheduling_policy,
        images=sim_images(settings.sim_image_tokens),
        fail_every=settings.sim_fail_every,
        max_adapters=settings.max_adapters,
        max_adapter_rank=settings.max_adapter_rank,
    )
    engine = SimEngine(config, make_agent, tiers, find_holders)
    return BuiltEngine(engine, staging_bytes, landing_bytes)


def sim_images(num_tokens: int) -> ImageFacts | None:
    return ImageFacts(IMAGE_ID, (IMAGE_ID,) * num_tokens, SIM_MAX_IMAGES) if num_tokens else None


def build_sim_encoder(
    settings: EngineSettings, make_transport: Callable[[], KvTransport]
) -> BuiltEngine:
    """Raises EngineMisconfigured for a model that takes no images, or for an unknown law."""
    images = sim_images(settings.sim_image_tokens)
    if images is None:
        raise EngineMisconfigured("the sim model takes no images: set SIM_IMAGE_TOKENS")
    fingerprint = sim_fingerprint(sim_params(settings))
    identity = AgentIdentity(
        settings.instance_id, settings.incarnation, fingerprint, group_id=settings.group_id
    )

    def make_agent(pool: EmbeddingPool) -> KvAgent:
        return KvAgent(make_transport(), identity, host_memory(0, 0, pool), lambda _: None)

    config = SimEncoderConfig(
        settings.model,
        fingerprint,
        settings.max_model_len,
        images,
        settings.embedding_pool_bytes,
        _law(settings),
    )
    return BuiltEngine(SimEncoderEngine(config, make_agent), 0, 0)


def build_sim_pooling(settings: EngineSettings) -> BuiltEngine:
    identity = f"sim/{settings.sim_pooling}/{settings.sim_dimensions}/{settings.sim_seed}"
    config = SimPoolingConfig(
        model=settings.model,
        model_fingerprint=hashlib.blake2b(identity.encode(), digest_size=8).hexdigest(),
        num_slots=settings.num_slots,
        max_model_len=settings.max_model_len,
        seed=settings.sim_seed,
        num_dimensions=settings.sim_dimensions,
        law=_law(settings),
        scores_pairs=settings.sim_pooling == "classify",
    )
    return BuiltEngine(SimPoolingEngine(config), 0, 0)


def _law(settings: EngineSettings) -> Law:
    """Raises EngineMisconfigured."""
    if settings.sim_law not in LAWS:
        raise EngineMisconfigured(
            f"unknown law {settings.sim_law!r}; choose from {', '.join(LAWS)}"
        )
    return LAWS[settings.sim_law]


def sim_params(settings: EngineSettings) -> SimParams:
    """The model that an instance with these settings simulates."""
    return SimParams(
        seed=settings.sim_seed,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        eos_period=settings.sim_eos_period,
        num_layers=settings.sim_num_layers,
        token_bytes=settings.sim_token_bytes,
    )


def _sim_tiers(settings: EngineSettings, params: SimParams, fingerprint: str) -> TierStack:
    compute_s = LAWS[settings.sim_law].prefill_token_s * params.block_size
    return open_tiers(
        settings.tiers,
        model_fingerprint=fingerprint,
        block_bytes=params.num_layers * params.block_bytes,
        costs=CostBook(recompute_block_s=compute_s) if compute_s else None,
    )


def _check_kv_path(settings: EngineSettings) -> None:
    """Check that this machine can move KV in the way that the sim's settings demand.

    vLLM's workers check this themselves. Raises EngineMisconfigured.
    """
    if not settings.requires_rdma and settings.kv_memory is not KvMemory.DEVICE:
        return
    from pdmesh.kv.device.probe import host_facts  # loads the UCX libraries

    try:
        facts = host_facts(settings.kv_host)
        decide_path(settings.kv_memory, facts, requires_rdma=settings.requires_rdma)
    except (NoSuchPath, KvTransferFailed) as error:
        raise EngineMisconfigured(f"{error} (docs/gpu.md)", reason="KV_NO_TRANSPORT") from error


def _ucx(settings: EngineSettings) -> KvTransport:
    from pdmesh.kv.transport.ucx import UcxTransport  # loads the UCX libraries

    return UcxTransport(settings.kv_host)


def _build_vllm(settings: EngineSettings, find_holders: FindHolders | None) -> BuiltEngine:
    from pdmesh.engine.vllm.config import VllmConfig
    from pdmesh.engine.vllm.engine import VllmEngine

    if settings.model_dir is None:
        raise EngineMisconfigured("vLLM needs a model folder: set PDMESH_MODEL_DIR")
    default = 256 << 20
    staging_bytes = settings.sends_kv * (settings.staging_bytes or default)
    landing_bytes = settings.receives_kv * (settings.landing_bytes or default)
    config = VllmConfig(
        instance_id=settings.instance_id,
        incarnation=settings.incarnation,
        model_dir=settings.model_dir,
        model=settings.model,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        domain=settings.domain,
        block_size=settings.block_size,
        kv_cache_bytes=_kv_cache_bytes(settings),
        staging_bytes=staging_bytes,
        landing_bytes=landing_bytes,
        kv_host=settings.kv_host,
        kv_memory=settings.kv_memory,
        requires_rdma=settings.requires_rdma,
        group_id=settings.group_id,
        lease_s=settings.ticket_lease_s,
        max_pulls=settings.max_pulls,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.num_slots,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        tiers=settings.tiers,
        speculation=settings.speculation,
        async_scheduling=settings.async_scheduling,
        weights_loader=settings.weights_loader,
        engine_args=settings.engine_args,
        scheduling_policy=settings.scheduling_policy,
        max_adapters=settings.max_adapters,
        max_adapter_rank=settings.max_adapter_rank,
        file_digests=settings.file_digests,
        failpoints=settings.failpoint,
    )
    return BuiltEngine(VllmEngine(config, find_holders), staging_bytes, landing_bytes)


def _kv_cache_bytes(settings: EngineSettings) -> int:
    """The bytes for KV, or 0 if vLLM is to compute them from `gpu_memory_utilization`."""
    share_decides = "gpu_memory_utilization" in settings.engine_args
    return settings.kv_cache_bytes or (0 if share_decides else 512 << 20)


def _build_vllm_pooling(settings: EngineSettings) -> BuiltEngine:
    from pdmesh.engine.vllm.pooling.config import VllmPoolingConfig
    from pdmesh.engine.vllm.pooling.engine import VllmPoolingEngine

    if settings.model_dir is None:
        raise EngineMisconfigured("vLLM needs a model folder: set PDMESH_MODEL_DIR")
    config = VllmPoolingConfig(
        instance_id=settings.instance_id,
        incarnation=settings.incarnation,
        model_dir=settings.model_dir,
        model=settings.model,
        dtype=settings.dtype,
        convert=settings.pooling_convert,
        tensor_parallel_size=settings.tensor_parallel_size,
        kv_cache_bytes=_kv_cache_bytes(settings),
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        weights_loader=settings.weights_loader,
        engine_args=settings.engine_args,
        file_digests=settings.file_digests,
        failpoints=settings.failpoint,
    )
    return BuiltEngine(VllmPoolingEngine(config), 0, 0)


def _build_vllm_encoder(settings: EngineSettings) -> BuiltEngine:
    from pdmesh.engine.vllm.encoding.config import VllmEncoderConfig
    from pdmesh.engine.vllm.encoding.engine import VllmEncoderEngine

    if settings.model_dir is None:
        raise EngineMisconfigured("vLLM needs a model folder: set PDMESH_MODEL_DIR")
    config = VllmEncoderConfig(
        instance_id=settings.instance_id,
        incarnation=settings.incarnation,
        model_dir=settings.model_dir,
        model=settings.model,
        dtype=settings.dtype,
        kv_host=settings.kv_host,
        group_id=settings.group_id,
        kv_cache_bytes=_kv_cache_bytes(settings),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.num_slots,
        pool_bytes=settings.embedding_pool_bytes,
        engine_args=settings.engine_args,
        file_digests=settings.file_digests,
        failpoints=settings.failpoint,
    )
    return BuiltEngine(VllmEncoderEngine(config), 0, 0)
