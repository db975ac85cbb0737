"""The configuration of vLLM as an encoder, an instance that makes image embeddings.

The connector that moves the embeddings is configured here, too, for encoders and prefills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from pdmesh.core.instance.async_scheduling import AsyncScheduling, Decision, Schedules, decide
from pdmesh.core.instance.engine_args import EngineArgs
from pdmesh.engine.vllm.config import MEMORY_SHARE, installed_device, vision_arguments

EC_CONNECTOR_MODULE: Final = "pdmesh.engine.vllm.encoding.connector"
EC_CONNECTOR_CLASS: Final = "PdmeshEcConnector"


class CarriesEmbeddings(Protocol):
    """The settings that the connector needs from the configuration of an encoder or a prefill."""

    @property
    def instance_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def kv_host(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def failpoints(self) -> str: ...


@dataclass(frozen=True, slots=True)
class VllmEncoderConfig:
    """The engine of one encoder. It has one rank."""

    instance_id: str
    incarnation: int
    model_dir: Path
    model: str  # the name that clients use
    device: str = field(default_factory=installed_device)  # cpu or cuda
    dtype: str = ""  # must equal the prefills' dtype; empty: the default for the device
    kv_host: str = "127.0.0.1"
    group_id: str = ""
    kv_cache_bytes: int = 512 << 20  # used only with the language model; 0: vLLM decides
    max_model_len: int = 2048  # tokens of the longest request; a request is one image
    max_num_seqs: int = 8
    pool_bytes: int = 256 << 20
    engine_args: EngineArgs = field(default_factory=dict)  # more of vLLM's arguments
    # SHA-256 of the model's files by name, if they were verified before the engine is built.
    file_digests: Mapping[str, str] = field(default_factory=dict)
    failpoints: str = ""
    num_ranks: int = 1
    kv_cache_dtype: str = "auto"

    @property
    def effective_dtype(self) -> str:
        return self.dtype or ("float32" if self.device == "cpu" else "auto")

    @property
    def scheduling(self) -> Decision:
        return decide(AsyncScheduling.AUTO, Schedules(self.device, reads_images=True))

    @property
    def has_worker_process(self) -> bool:
        return self.device == "cpu" and self.scheduling.is_async

    @property
    def has_language_model(self) -> bool:
        """Whether the encoder loads the language model too, and draws a token for each image.

        vLLM's own code for a model leaves the language model out of an encoder. Without
        torchvision, `vision_arguments` chooses the code of transformers instead. With that code,
        vLLM 0.32 does not start unless the language model is loaded ("Layer 0 does not dispatch
        through the Transformers attention interface").
        """
        return find_spec("torchvision") is None


def encoder_arguments(
    config: VllmEncoderConfig, private_dir: Path, computation: str
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. vLLM mixes their types, hence Any.

    Prefix caching is off, since vLLM does not encode the image of a prompt whose KV is cached.
    """
    role: EcRole = "ec_both" if config.has_language_model else "ec_producer"
    path = embeddings_path(private_dir)
    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "served_model_name": [config.model],
        "dtype": config.effective_dtype,
        "enforce_eager": config.device == "cpu",
        "gpu_memory_utilization": MEMORY_SHARE,
        "kv_cache_memory_bytes": config.kv_cache_bytes or None,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": False,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "async_scheduling": config.scheduling.is_async,
        "ec_transfer_config": ec_config(config, role, computation, path, config.pool_bytes),
        "distributed_executor_backend": "mp" if config.has_worker_process else "uni",
    }
    return arguments | vision_arguments()


EcRole = Literal["ec_producer", "ec_consumer", "ec_both"]


def ec_config(
    config: CarriesEmbeddings, role: EcRole, computation: str, path: Path, pool_bytes: int = 0
) -> Any:
    """vLLM's ECTransferConfig. The type is Any because vLLM is imported late.

    `computation` is a digest of the model's files, its dtype and what else changes embeddings. The
    encoder and the prefill must have the same digest.
    """
    from vllm.config import ECTransferConfig

    return ECTransferConfig(
        ec_connector=EC_CONNECTOR_CLASS,
        ec_connector_module_path=EC_CONNECTOR_MODULE,
        ec_role=role,
        ec_connector_extra_config={
            "control_path": str(path),
            "instance_id": config.instance_id,
            "incarnation": config.incarnation,
            "computation": computation,
            "kv_host": config.kv_host,
            "group_id": config.group_id,
            "pool_bytes": pool_bytes,
            "failpoints": config.failpoints,
        },
    )


def embeddings_path(private_dir: Path) -> Path:
    return private_dir / "embeddings.sock"
