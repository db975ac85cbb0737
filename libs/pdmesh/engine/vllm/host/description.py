"""Describes a started vLLM to the mesh, from the RankHello of each worker.

A ticket is the right to pull one prompt's KV, and `Endpoint` has the fields that all tickets of an
engine share. The instance publishes the `EngineInfo` in the registry.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.engine.base import EngineInfo
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.host.jobs import Endpoint
from pdmesh.engine.vllm.messages import RankHello
from pdmesh.errors import EngineMisconfigured


def endpoint_of(config: VllmConfig, block_size: int, hellos: Sequence[RankHello]) -> Endpoint:
    """`block_size` is the size that vLLM chose, in tokens.

    Raises EngineMisconfigured if it is not the configured size, or if the ranks' KV layouts differ.
    """
    first = hellos[0]
    if block_size != config.block_size:
        raise EngineMisconfigured(
            f"vLLM chose a block size of {block_size} tokens, not {config.block_size}; set "
            "block_size to one that its attention kernels support",
        )
    if len({h.model_fingerprint for h in hellos}) > 1:
        raise EngineMisconfigured("the ranks have different layouts of the KV cache")
    return Endpoint(
        instance_id=config.instance_id,
        incarnation=config.incarnation,
        model_fingerprint=first.model_fingerprint,
        addresses=tuple(h.address for h in hellos if h.address),
        kv_bytes_per_token=max(h.block_bytes for h in hellos) // config.block_size,
        block_size=config.block_size,
        lease_ms=round(1000 * config.lease_s),
        max_model_len=config.max_model_len,
        windows=tuple(first.windows),
        named_group=first.named_group,
    )


def num_kv_blocks(hello: RankHello, max_model_len: int, block_size: int) -> int:
    """The number of blocks of text that fit into the cache. vLLM's null block is left out.

    Layers with a window count as if they kept all tokens. But with windows, the result is at least
    the longest prompt's number of blocks, because vLLM has made sure that this prompt fits.
    """
    num_blocks = (hello.num_blocks - 1) // hello.num_groups
    return max(num_blocks, -(-max_model_len // block_size)) if hello.windows else num_blocks


def info_of(
    config: VllmConfig,
    endpoint: Endpoint,
    hellos: Sequence[RankHello],
    images: ImageFacts | None = None,
) -> EngineInfo:
    return EngineInfo(
        engine="vllm",
        model=config.model,
        model_fingerprint=endpoint.model_fingerprint,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks(hellos[0], config.max_model_len, config.block_size),
        kv_bytes_per_token=endpoint.kv_bytes_per_token * len(hellos),
        max_model_len=config.max_model_len,
        num_ranks=len(hellos),
        supports_logprobs=True,
        supports_constraints=(config.model_dir / "tokenizer.json").exists(),  # grammars need it
        unsupported_shaping=unsupported_shaping(config),
        kv_addresses=endpoint.addresses,
        max_adapters=config.max_adapters,
        images=images,
        kv_path=" | ".join(dict.fromkeys(h.kv_path for h in hellos if h.address)),
        fetches_embeddings=images is not None,  # see `EmbeddingClient`
        windows=endpoint.windows,
    )


def unsupported_shaping(config: VllmConfig) -> tuple[str, ...]:
    """The sampling options that this engine cannot apply.

    These are names of fields of LogitShaping, or logprob_token_ids.
    """
    # vLLM cannot apply these options to tokens that speculation proposes.
    proposed = ("min_p", "logit_bias", "thinking_token_budget", "logprob_token_ids")
    if config.speculation.max_tokens:
        return proposed
    return () if config.device == "cpu" else ("thinking_token_budget",)  # see ThinkingBudgets
