"""Combines the settings of an instance's environment with those that the master assigned.

An assignment's role spec names the role and the group. It may also choose the model and the
engine's options, but not the addresses at which the process listens or the certificates that the
process trusts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import ValidationError

from pdmesh.core.instance.admission import Capacity, Work
from pdmesh.core.instance.role_work import DEFAULT_SLOTS, WORKS, keeps_kv
from pdmesh.core.model import Role, RoleSpec
from pdmesh.core.speculation.proposal_length import Speculation
from pdmesh.engine.base import EngineInfo
from pdmesh.engine.factory import BuiltEngine, EngineSettings
from pdmesh.errors import EngineFailed
from pdmesh.instance.settings import InstanceSettings
from pdmesh.kv.tiers.config import TierConfig

S = TypeVar("S", bound=InstanceSettings)

OPTIONS: Final = frozenset(
    {
        "dtype", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size",
        "kv_cache_bytes", "num_slots", "block_size", "max_model_len",
        "num_kv_blocks", "staging_bytes", "landing_bytes", "max_retrievals", "max_pulls",
        "max_waiting",
        "max_reserved_output", "kv_host_pool_bytes", "sim_law", "sim_eos_period", "sim_num_layers",
        "sim_token_bytes", "sim_seed",
        "sim_fail_every", "max_num_batched_tokens", "speculation", "speculative_tokens",
        "speculative_acceptance", "speculative_token_cost",
        "async_scheduling", "weights_loader", "scheduling_policy", "engine_args", "enable_lora",
        "max_loras", "max_lora_rank", "embedding_pool_bytes",
        "pooling_convert", "sim_pooling", "sim_dimensions", "sim_image_tokens",
    }
)  # fmt: skip


class RoleRefused(EngineFailed):
    """The instance cannot take the assigned role spec. `reason` names the cause."""

    default_reason = "BAD_ASSIGNMENT"


def own_role_spec(settings: InstanceSettings, role: Role) -> RoleSpec:
    """The role spec of an instance that has its role from its settings, not from the master."""
    return RoleSpec(role, settings.group_id, settings.scenario, model=model_name(settings))


def settings_for(settings: S, role_spec: RoleSpec, artefact: Mapping[str, str]) -> S:
    """Apply the artefact's options, then the role spec's, to the settings. Raises RoleRefused."""
    if role_spec.role not in WORKS:
        raise RoleRefused(f"an instance cannot be {role_spec.role.value}")
    changes: dict[str, object] = {**artefact, **dict(role_spec.options)}
    for name in changes:
        if name not in OPTIONS:
            raise RoleRefused(f"{name} is not an engine option", reason="BAD_OPTION", field=name)
    changes |= {"group_id": role_spec.group_id, "scenario": role_spec.scenario}
    if role_spec.model:
        changes["model"] = role_spec.model
    if role_spec.model_dir:
        changes["model_dir"] = role_spec.model_dir
    if not keeps_kv(role_spec.role):
        changes |= {"kv_host_pool_bytes": 0, "kv_file_store_dir": None}
    if not (settings.num_slots or changes.get("num_slots")):
        changes["num_slots"] = DEFAULT_SLOTS[role_spec.role]
    try:
        return type(settings)(**{**settings.model_dump(), **changes})
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, error["loc"]))
        raise RoleRefused(f"{name}: {error['msg']}", reason="BAD_OPTION", field=name) from None


def model_name(settings: InstanceSettings) -> str:
    if settings.model or settings.model_dir is None:
        return settings.model or settings.engine
    return settings.model_dir.name


def engine_settings(settings: InstanceSettings, role: Role, incarnation: int) -> EngineSettings:
    works = WORKS[role]
    return EngineSettings(
        engine=settings.engine,
        instance_id=settings.instance_id,
        incarnation=incarnation,
        model=model_name(settings),
        model_dir=settings.model_dir,
        num_slots=settings.num_slots,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_kv_blocks=settings.num_kv_blocks,
        staging_bytes=settings.staging_bytes,
        landing_bytes=settings.landing_bytes,
        max_retrievals=settings.max_retrievals,
        max_pulls=settings.max_pulls,
        ticket_lease_s=settings.ticket_lease_s,
        sends_kv=Work.PREFILL in works,
        receives_kv=Work.DECODE in works,
        kv_host=settings.inner_host,
        kv_memory=settings.kv_memory,
        requires_rdma=settings.require_rdma,
        group_id=settings.group_id,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        kv_cache_bytes=settings.kv_cache_bytes,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        speculation=(
            speculation_of(settings)
            if Work.DECODE in works
            else speculation_of(settings).at_prefill()
        ),
        async_scheduling=settings.async_scheduling,
        weights_loader=settings.weights_loader,
        engine_args=settings.engine_args,
        scheduling_policy=settings.scheduling_policy,
        max_adapters=settings.max_loras if settings.enable_lora else 0,
        is_pooling=role is Role.POOLING,
        is_encoder=role is Role.ENCODER,
        embedding_pool_bytes=settings.embedding_pool_bytes,
        pooling_convert=settings.pooling_convert,
        sim_pooling=settings.sim_pooling,
        sim_dimensions=settings.sim_dimensions,
        max_adapter_rank=settings.max_lora_rank,
        failpoint=settings.failpoint,
        tiers=tiers_of(settings),
        sim_law=settings.sim_law,
        sim_eos_period=settings.sim_eos_period,
        sim_num_layers=settings.sim_num_layers,
        sim_token_bytes=settings.sim_token_bytes,
        sim_seed=settings.sim_seed,
        sim_fail_every=settings.sim_fail_every,
        sim_image_tokens=settings.sim_image_tokens,
    )


def speculation_of(settings: InstanceSettings) -> Speculation:
    acceptance, cost = settings.speculative_acceptance, settings.speculative_token_cost
    if settings.speculation is not None:
        return settings.speculation.speculation(acceptance, cost)
    return Speculation(settings.speculative_tokens, acceptance, cost)


def tiers_of(settings: InstanceSettings) -> TierConfig:
    return TierConfig(
        host_pool_bytes=settings.kv_host_pool_bytes,
        file_store_dir=str(settings.kv_file_store_dir or ""),
        file_store_bytes=settings.kv_file_store_bytes,
        owner_share=settings.kv_tier_owner_share,
        timeout_s=settings.kv_tier_timeout_s,
        uses_peers=settings.kv_peer_pools,
    )


def capacity_of(
    settings: InstanceSettings, role: Role, built: BuiltEngine, info: EngineInfo
) -> Capacity:
    """The loaded engine's capacity, against which admission checks each leg."""
    return Capacity(
        works=WORKS[role],
        num_slots=settings.num_slots,
        num_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        block_bytes=info.kv_bytes_per_token * info.block_size // info.num_ranks,
        max_model_len=info.max_model_len,
        staging_bytes=built.staging_bytes,
        landing_bytes=built.landing_bytes,
        max_retrievals=settings.max_retrievals,
        max_waiting=settings.max_waiting if role is Role.DECODE else 0,
        model_fingerprint=info.model_fingerprint,
        model=info.model,
        num_ranks=info.num_ranks,
        max_reserved_output=settings.max_reserved_output or None,
        num_adapters=info.max_adapters,
        takes_images=info.images is not None,
        windows=info.windows,
    )
