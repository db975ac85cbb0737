"""The vLLM engine's configuration, and how it becomes vLLM's arguments and environment.

Most differences between an engine on a CPU and one on a GPU are decided here, by `device`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pdmesh.core.deadlines import TICKET_LEASE_S
from pdmesh.core.instance.async_scheduling import AsyncScheduling, Decision, Schedules, decide
from pdmesh.core.instance.engine_args import EngineArgs
from pdmesh.core.instance.urgency import SchedulingPolicy
from pdmesh.core.kv.transfer.gpu_or_host import KvMemory
from pdmesh.core.kv.transfer.incoming_blocks import MAX_PULLS
from pdmesh.core.loading.weights_loader import LoaderChoice, WeightsLoader
from pdmesh.core.model import DomainRank
from pdmesh.core.speculation.proposal_length import NO_SPECULATION, Speculation
from pdmesh.cores import usable_cores
from pdmesh.engine.vllm.loading.choice import loader_arguments, loader_choice
from pdmesh.engine.vllm.speculation.methods import speculative_config
from pdmesh.kv.tiers.config import TierConfig

CONNECTOR_MODULE = "pdmesh.engine.vllm.connector.connector"
CONNECTOR_CLASS = "PdmeshConnector"
SCHEDULERS = "pdmesh.engine.vllm.connector.scheduler"
# A step on a CPU must be short, because pings and the decodes in the same step wait for its end.
# Short steps cost nothing: a prompt of 1,900 tokens took 6.1 s of a core in steps of this size, and
# 6.5 s in a single step (SmolLM2-135M, float32). On a busy machine, the longest ping took 4 s with
# steps of this size, and 18 s with a single step. On a CPU without instructions for the model's
# number format, a step of this size takes 13 s.
CPU_STEP_TOKENS = 512
MEMORY_SHARE = 0.3  # this share of a GPU's memory must be free; engines may share a GPU
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the LoRA ranks that vLLM allows
MAX_IMAGES = 8  # in a prompt


def installed_device() -> str:
    """The device that the installed build of torch is for, found without importing torch.

    vLLM's build must match it.
    """
    try:
        return "cpu" if "+cpu" in version("torch") else "cuda"
    except PackageNotFoundError:
        return "cpu"  # the start reports what is missing


class Placed(Protocol):
    """Where an engine of any role runs, and what it needs there."""

    @property
    def instance_id(self) -> str: ...
    @property
    def model_dir(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def effective_dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def has_worker_process(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """The engine of one instance. Bytes are per rank.

    A prefill stages KV in an arena of `staging_bytes`, and a decode pulls KV into an arena of
    `landing_bytes`.
    """

    instance_id: str
    incarnation: int
    model_dir: Path
    model: str  # the name that clients use
    device: str = field(default_factory=installed_device)  # cpu or cuda
    dtype: str = (
        ""  # empty: float32 on a CPU (equal outputs on every instance), the model's on a GPU
    )
    kv_cache_dtype: str = "auto"  # format of stored K and V; auto: as computed; fp8: half the bytes
    block_size: int = 64  # tokens
    kv_cache_bytes: int = 512 << 20  # 0: the memory that `gpu_memory_utilization` leaves
    staging_bytes: int = 256 << 20  # 0: this instance hands on no KV
    landing_bytes: int = 256 << 20  # 0: this instance receives no KV
    kv_host: str = "127.0.0.1"  # a loopback address keeps KV on this machine
    kv_memory: KvMemory = KvMemory.AUTO  # on a GPU, the memory in which KV is staged and lands
    requires_rdma: bool = False
    group_id: str = ""  # KV is handed on only within this group
    max_pulls: int = MAX_PULLS  # pulls of KV at once
    lease_s: float = TICKET_LEASE_S  # how long a staged prompt waits for its decode
    max_model_len: int = 2048
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 0  # per step; 0: `CPU_STEP_TOKENS` on a CPU, vLLM's own on a GPU
    tensor_parallel_size: int = 1  # ranks of each pipeline stage
    pipeline_parallel_size: int = 1  # stages, each with some of the model's layers
    domain: DomainRank | None = None  # place in a data-parallel domain, if there is one
    tiers: TierConfig = field(default_factory=TierConfig)
    speculation: Speculation = NO_SPECULATION
    async_scheduling: AsyncScheduling = AsyncScheduling.AUTO  # plan a step while one is computed
    weights_loader: WeightsLoader = WeightsLoader.AUTO
    engine_args: EngineArgs = field(default_factory=dict)  # more of vLLM's arguments
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    max_adapters: int = 0  # LoRA adapters loaded at once
    max_adapter_rank: int = 16
    # SHA-256 of the model's files by name, if they were verified before the engine is built.
    file_digests: Mapping[str, str] = field(default_factory=dict)
    failpoints: str = ""  # armed in the workers, see failpoints.py

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_vision(self) -> bool:
        return has_vision(self.model_dir)

    @property
    def effective_dtype(self) -> str:
        return self.dtype or ("float32" if self.device == "cpu" else "auto")

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step computes, at least one for each sequence.

        0 is vLLM's choice.
        """
        asked = self.max_num_batched_tokens or (CPU_STEP_TOKENS if self.device == "cpu" else 0)
        return max(asked, self.max_num_seqs) if asked else 0

    @property
    def num_spare_adapter_slots(self) -> int:
        """On a CPU, vLLM gets one slot more than there are adapters.

        If one row of a batch has an adapter, vLLM computes the rows without an adapter as if they
        had the adapter in the last slot (index -1). vLLM always fills the first free slot, so the
        spare slot stays empty.
        """
        return 1 if self.device == "cpu" else 0

    @property
    def scheduling(self) -> Decision:
        """Whether steps are scheduled asynchronously.

        An engine with memory to stage KV, and none for KV to land in, serves prefill.
        """
        return decide(
            self.async_scheduling,
            Schedules(
                self.device,
                hands_on_all=bool(self.staging_bytes and not self.landing_bytes),
                proposes_tokens=self.speculation.max_tokens > 0,
                reads_images=self.has_vision,
                num_stages=self.pipeline_parallel_size,
            ),
        )

    @property
    def loader(self) -> LoaderChoice:
        return loader_choice(self.weights_loader, self.model_dir)

    @property
    def has_worker_process(self) -> bool:
        """Whether each rank computes in its own process, apart from the scheduler's.

        On a CPU, asynchronous scheduling needs this: in one process, a single thread schedules and
        computes.
        """
        return self.num_ranks > 1 or (self.device == "cpu" and self.scheduling.is_async)

    @property
    def is_eager(self) -> bool:
        """Whether vLLM runs without compilation.

        On a CPU, a compiled start takes minutes with a cold cache.
        """
        return self.device == "cpu"


def environment(config: Placed, current: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that vLLM needs before its import. Variables already set are kept.

    The variables make vLLM offline and silent: no download, no usage report, and no request in a
    log. On a CPU, they also set vLLM's threads.
    """
    values = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM warns a dozen times about settings that we choose
        "VLLM_USE_AOT_COMPILE": "0",  # otherwise the compile cache is never reloaded
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device == "cpu":
        num_ranks, cores = config.num_ranks, usable_cores()
        values |= {
            "OMP_NUM_THREADS": str(threads_per_rank(len(cores), num_ranks)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            # AsyncLLM runs EngineCore in a child process in either case. With 0, a single rank's
            # worker may run in the same child, which saves 5 s and 300 MB.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if num_ranks == 1 else "1",
        }
        if config.has_worker_process:
            binding = thread_binding(cores, num_ranks) if num_ranks > 1 else "nobind"
            values["VLLM_CPU_OMP_THREADS_BIND"] = binding
    return {name: value for name, value in values.items() if name not in current}


def threads_per_rank(num_cores: int, num_ranks: int) -> int:
    """How many threads each rank computes with.

    A single rank gets half of the cores, because a prefill and a decode may share a machine.
    Several ranks share the cores equally.
    """
    return max(1, num_cores // max(2, num_ranks))


def thread_binding(cores: Sequence[int], num_ranks: int) -> str:
    """The cores that each rank computes on, in vLLM's notation: "0,1|2,3" for two ranks.

    Ranks wait for each other in every layer, so two ranks on one core would wait for each other's
    time slice. With fewer cores than ranks, no thread is bound to a core.
    """
    share = len(cores) // num_ranks
    if not share:
        return "nobind"
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def engine_arguments(config: VllmConfig, private_dir: Path, computation: str) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. vLLM mixes their types, hence Any."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "served_model_name": [config.model],
        "skip_tokenizer_init": True,
        "dtype": config.effective_dtype,
        "enforce_eager": config.is_eager,
        "kv_cache_dtype": config.kv_cache_dtype,
        "block_size": config.block_size,
        "gpu_memory_utilization": MEMORY_SHARE,
        "kv_cache_memory_bytes": config.kv_cache_bytes or None,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": engine_seed(config),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": None,  # with windows, a prefix may end at any block
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # jobs have the sampling parameters, not the model's folder
        "disable_log_stats": True,
        "async_scheduling": config.scheduling.is_async,
        "scheduling_policy": config.scheduling_policy.value,
        "scheduler_cls": scheduler_class(config),
        "kv_events_config": KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=events_endpoint(private_dir),
            buffer_steps=1,
        ),
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR_CLASS,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config=connector_config(config, private_dir, computation),
        ),
    }
    if config.step_tokens:
        arguments["max_num_batched_tokens"] = config.step_tokens
    if config.speculation.max_tokens:
        arguments["speculative_config"] = speculative_config(
            config.speculation, config.max_num_seqs
        )
    arguments |= loader_arguments(config.loader)
    if config.max_adapters:
        arguments |= lora_arguments(config)
    if config.has_vision:
        arguments |= vision_arguments()
    if config.num_ranks == 1:
        arguments["distributed_executor_backend"] = "mp" if config.has_worker_process else "uni"
    return arguments


def scheduler_class(config: VllmConfig) -> str:
    if config.speculation.max_tokens and not config.speculation.is_fixed:
        return f"{SCHEDULERS}.adaptive_scheduler.AdaptiveScheduler"
    is_async = config.scheduling.is_async
    return f"{SCHEDULERS}.timed_scheduler.Timed{'Async' if is_async else ''}Scheduler"


def lora_arguments(config: VllmConfig) -> dict[str, Any]:
    """vLLM's arguments for LoRA adapters.

    Host memory takes as many adapters as there are slots, so that vLLM never evicts an adapter by
    itself.
    """
    num_slots = config.max_adapters + config.num_spare_adapter_slots
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "max_lora_rank": next(r for r in LORA_RANKS if r >= config.max_adapter_rank),
    }


def has_vision(model_dir: Path) -> bool:
    """Whether the model's configuration has a part that reads images."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # reading the model reports it
    return isinstance(config, dict) and "vision_config" in config


def vision_arguments() -> dict[str, Any]:
    """vLLM's arguments for a model that reads images. vLLM's image processor needs a tokenizer.

    The processor's cache of images is off: each image is processed where its prompt is computed,
    and vLLM's encoder cache saves the costly part. For most such models, vLLM's own code needs
    torchvision. The builds of torchvision on PyPI do not run with torch for CPUs. Without
    torchvision, vLLM runs the model with the code of transformers.
    """
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
    }
    if find_spec("torchvision") is None:
        arguments["model_impl"] = "transformers"
    return arguments


def engine_seed(config: VllmConfig) -> int:
    """The seed for the draws of requests without a seed.

    vLLM's default is 0 in each engine. With this default, a decode would draw an answer's second
    token with the noise that prefill used for the first.
    """
    name = f"{config.instance_id}/{config.incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")


def connector_config(config: VllmConfig, private_dir: Path, computation: str) -> dict[str, Any]:
    """The settings for our connector, as plain values that vLLM passes on to its processes."""
    return {
        "control_path": str(control_path(private_dir)),
        "instance_id": config.instance_id,
        "incarnation": config.incarnation,
        "computation": computation,
        "device": config.device,
        "staging_bytes": config.staging_bytes,
        "landing_bytes": config.landing_bytes,
        "kv_host": config.kv_host,
        "kv_memory": config.kv_memory.value,
        "requires_rdma": config.requires_rdma,
        "group_id": config.group_id,
        "block_size": config.block_size,
        "tiers": config.tiers.to_plain() if config.tiers.is_on else None,
        "max_pulls": config.max_pulls,
        "failpoints": config.failpoints,
        "speculation": asdict(config.speculation),
    }


def control_path(private_dir: Path) -> Path:
    return private_dir / "control.sock"


def events_endpoint(private_dir: Path) -> str:
    return f"ipc://{private_dir / 'kv-events.sock'}"
