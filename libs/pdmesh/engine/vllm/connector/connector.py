"""The KV connector that vLLM loads. It moves prompts' KV from one instance of the mesh to another.

vLLM creates `PdmeshConnector` once in its scheduler and once in each worker. The class only passes
vLLM's calls on: in the scheduler to `HandoffPlanner`, and in a worker to `HandoffWorker`. The KV of
a request without the mesh's `kv_transfer_params` is not handed to a decode. The tiers, which keep
KV in host memory and in files, may still store it, and peers may fetch it from there. To gather KV
is to copy it out of vLLM's blocks, for another instance to pull.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdmesh.core.kv.layout.cache_groups import BlockLists
from pdmesh.core.kv.tiers.step_copies import StepCopies, StepCopyPlanner
from pdmesh.engine.vllm.connector.cache_specs import (
    group_of_layers,
    groups_of,
    state_specs,
    states_text,
    with_state_pages,
)
from pdmesh.engine.vllm.connector.kv_facts import as_stage, kv_facts, rank_place
from pdmesh.engine.vllm.connector.refusal import told_to_host
from pdmesh.engine.vllm.connector.scheduler.first_tokens import EarlyRequests
from pdmesh.engine.vllm.connector.scheduler.grammars import compile_with_drawn, has_failed
from pdmesh.engine.vllm.connector.scheduler.handoff import LOAD, HandoffPlanner, StepPlan
from pdmesh.engine.vllm.connector.scheduler.request_images import images_at, num_without_image
from pdmesh.engine.vllm.connector.scheduler.step_news import StepNews
from pdmesh.engine.vllm.connector.worker.draws.drawn_before import count_drawn_as_output
from pdmesh.engine.vllm.connector.worker.draws.placeholders import keep_placeholders
from pdmesh.engine.vllm.connector.worker.draws.seeded_draws import draw_by_position
from pdmesh.engine.vllm.connector.worker.draws.thinking_budgets import keep_thinking_budgets
from pdmesh.engine.vllm.connector.worker.draws.told_logprobs import tell_each_its_own
from pdmesh.engine.vllm.connector.worker.step_clock import StepClock, time_steps
from pdmesh.engine.vllm.connector.worker.work_signs import sign_adapter_loads
from pdmesh.engine.vllm.connector.worker.worker import HandoffWorker
from pdmesh.engine.vllm.host.sampling import CONSTRAINT_FAILED
from pdmesh.engine.vllm.model.cache_kinds import may_reuse_prefixes
from pdmesh.engine.vllm.model.stage_inputs import make_room_for_inputs
from pdmesh.engine.vllm.speculation.bonus_token import count_proposed_tokens
from pdmesh.engine.vllm.speculation.cpu_sampling import mend_drawing_on_cpu

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PlanMetadata(KVConnectorMetadata):
    """Carries one step's plan from the scheduler to the workers, through vLLM's own channel."""

    def __init__(self, plan: StepPlan, tiers: StepCopies | None, num_tokens: int) -> None:
        self.plan = plan
        self.tiers = tiers
        self.num_tokens = num_tokens  # tokens that the step computes, not counting proposed ones


class PdmeshConnector(KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Prefixes of non-causal layers may not be reused. vLLM detects such layers only in its own
        # processes, so they are refused here.
        if not may_reuse_prefixes(vllm_config):
            raise ValueError("pdmesh moves no KV of a model whose prefixes vLLM does not cache")
        told = self._kv_transfer_config.kv_connector_extra_config
        with told_to_host(told["control_path"]):
            groups = groups_of(kv_cache_config, vllm_config.cache_config.block_size)
        self._planner: HandoffPlanner | None = None
        self._lost: set[str] = set()  # requests that fail as soon as vLLM gives them blocks
        self._tiers: StepCopyPlanner | None = None
        self._worker: HandoffWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            compile_with_drawn()
            self._planner = HandoffPlanner(groups)
            if told["tiers"]:
                self._tiers = StepCopyPlanner(vllm_config.cache_config.block_size)
            self._early = EarlyRequests(vllm_config.cache_config.block_size)
        else:
            count_drawn_as_output()
            draw_by_position()
            keep_thinking_budgets()
            tell_each_its_own()
            if vllm_config.scheduler_config.async_scheduling:
                keep_placeholders()
            if vllm_config.speculative_config is not None:
                count_proposed_tokens()
                if told["device"] == "cpu":
                    mend_drawing_on_cpu()
            self._worker = HandoffWorker(
                told,
                place=(place := rank_place(vllm_config)),
                num_blocks=kv_cache_config.num_blocks,
                groups=groups,
                group_of=group_of_layers(kv_cache_config),
            )
            self._clock = StepClock()
            if place.stage:
                make_room_for_inputs()
            if place.is_first_to_draw:
                time_steps(self._clock)
            if vllm_config.lora_config is not None:
                sign_adapter_loads(self._worker.signs.layer)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: vLLM need not repeat a request that it preempts after the prompt's last step.

        That step has gathered the KV for the decode, and the request may finish with the token that
        the step drew.
        """
        return False

    # -- scheduler --------------------------------------------------------------------------------

    @property
    def planner(self) -> HandoffPlanner:
        assert self._planner is not None, "a scheduler's method"
        return self._planner

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if params:
            self.planner.add(request.request_id, params, request.num_prompt_tokens)
            if params.get("is_early") and self._early.add(params["leg"], request):
                self.planner.joined(request.request_id)
        if self._tiers is not None:
            self._tiers.add(
                request.request_id,
                request.cache_salt,
                request.all_token_ids,
                params.get("tiers"),
                is_pulled=params.get("pdmesh") == LOAD,
                images=images_at(request),
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._lost.discard(request.request_id)  # vLLM calls this again if it found no room
        external = self.planner.num_external_tokens(request.request_id, num_computed_tokens)
        if external == 0 and (missing := num_without_image(request, num_computed_tokens)):
            self._lost.add(request.request_id)
            return missing, True
        if external == 0 and self._tiers is not None:
            # Blocks of the tiers load within the step, because their bytes are already in host
            # memory.
            local = self._tiers.num_external_tokens(request.request_id, num_computed_tokens)
            return local, False
        return external, external is None or external > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()
        self.planner.allocated(request.request_id, block_ids, num_external_tokens)
        if request.request_id in self._lost:
            self._lost.remove(request.request_id)
            self.planner.lose(request.request_id)
        if self._tiers is not None:
            self._tiers.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = scheduler_output.kv_connector_block_state
        assert state is not None

        for key, count in scheduler_output.num_scheduled_tokens.items():

            def block_ids(key: str = key) -> BlockLists:
                lists: tuple[list[int], ...] = state.resolve_block_ids(key)
                return lists

            self.planner.scheduled(key, computed[key], count, block_ids)
            if self._tiers is not None:
                self._tiers.scheduled(key, computed[key], count, block_ids)
        tiers = self._tiers.take_plan() if self._tiers is not None else None
        proposed = scheduler_output.scheduled_spec_decode_tokens.values()
        num_tokens = scheduler_output.total_num_scheduled_tokens - sum(map(len, proposed))
        return PlanMetadata(self.planner.take_plan(), tiers, num_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM reuse the blocks at once.

        KV to hand over was gathered in the step that computed it.
        """
        self.planner.finished(request.request_id)
        self._lost.discard(request.request_id)
        if self._tiers is not None:
            self._tiers.finished(request.request_id)
        if request.kv_transfer_params and request.kv_transfer_params.get("is_early"):
            self._early.drop(request.kv_transfer_params["leg"])
        return False, {CONSTRAINT_FAILED: True} if has_failed(request) else None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the first tokens that the workers report.

        A request's first token is reported at the latest together with the end of its load.
        """
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, StepNews):
            for leg, token_id in news.first_tokens.items():
                if (key := self._early.tell(leg, token_id)) is not None:
                    self.planner.joined(key)

    # -- worker -----------------------------------------------------------------------------------

    @property
    def worker(self) -> HandoffWorker:
        assert self._worker is not None, "a worker's method"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM orders the layers by cache group. The worker gets them in the model's order."""
        order = list(self._vllm_config.compilation_config.static_forward_context)
        in_order = {name: kv_caches[name] for name in sorted(kv_caches, key=order.index)}
        told = self._kv_transfer_config.kv_connector_extra_config
        specs = state_specs(self._kv_cache_config)
        facts = kv_facts(self._vllm_config, in_order)
        if specs:
            facts = replace(facts, backends=f"{facts.backends} {states_text(specs)}")
        if self._vllm_config.parallel_config.pipeline_parallel_size > 1:
            facts = as_stage(facts)
        with told_to_host(told["control_path"]):
            self.worker.start(with_state_pages(in_order, specs), facts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the worker's step.

        `start_load_kv` may be too late: if no load is awaited, vLLM calls it after the forward.
        """
        super().bind_connector_metadata(connector_metadata)
        metadata = self._metadata()
        self.worker.begin(metadata.plan, metadata.num_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker.tiers is not None:
            self.worker.tiers.load(self._step_copies())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is nothing to wait for: loads end before a step, never inside one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Gather the layer's KV of prompts that are handed on per layer.

        `wait_for_save` gathers the prompts that are handed on whole.
        """
        self.worker.put_layer(self._plan(), layer_name)

    def wait_for_save(self) -> None:
        self.worker.stage(self._plan())
        if self.worker.tiers is not None:
            self.worker.tiers.save(self._step_copies())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self.worker.take_results()
        return KVConnectorTransferResults(finished_recving=received | failed, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.tiers.take_failed_blocks() if self.worker.tiers is not None else set()

    def build_connector_worker_meta(self) -> StepNews | None:
        first_tokens, computed = self.worker.take_first_tokens(), self._clock.take()
        return StepNews(first_tokens, computed) if first_tokens or computed else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _metadata(self) -> PlanMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata

    def _plan(self) -> StepPlan:
        return self._metadata().plan

    def _step_copies(self) -> StepCopies:
        tiers = self._metadata().tiers
        assert tiers is not None, "scheduler and workers read the same settings"
        return tiers
