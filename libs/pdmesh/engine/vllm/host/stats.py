"""Counters from vLLM's statistics of steps: memory in use, requests, tokens and step times."""

from __future__ import annotations

from typing import Any, Final

from pdmesh.core.instance.step_times import StepTotals

STEP_TOTALS: Final = "pdmesh_step_totals"  # a key in the connector's statistics of a step


class SchedulerView:
    """vLLM's stat logger updates these counters on the instance's event loop, once per step."""

    def __init__(self) -> None:
        self.kv_cache_usage = 0.0
        self.num_steps = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_preempted = 0
        self.num_prompt_tokens_computed = 0
        self.num_prompt_tokens_cached = 0
        self.num_prompt_tokens_pulled = 0
        self.num_proposals = 0
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0
        self.step_totals = StepTotals().numbers()

    def numbers(self) -> dict[str, float]:
        return {
            "num_scheduler_running": self.num_running,
            "num_scheduler_waiting": self.num_waiting,
            "num_preempted": self.num_preempted,
            "num_prompt_tokens_computed": self.num_prompt_tokens_computed,
            "num_prompt_tokens_cached": self.num_prompt_tokens_cached,
            "num_prompt_tokens_pulled": self.num_prompt_tokens_pulled,
            "num_proposals": self.num_proposals,
            "num_proposed_tokens": self.num_proposed_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            **self.step_totals,
        }

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take the SchedulerStats and IterationStats of a step.

        vLLM's types are not stable, hence Any.
        """
        self.num_steps += 1
        if scheduler is not None:
            self.kv_cache_usage = scheduler.kv_cache_usage
            self.num_running = scheduler.num_running_reqs
            self.num_waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            if (told := scheduler.kv_connector_stats) is not None:
                self.step_totals = told.get(STEP_TOTALS, self.step_totals)
            if (checked := scheduler.spec_decoding_stats) is not None:
                self.num_proposals += checked.num_drafts
                self.num_proposed_tokens += checked.num_draft_tokens
                self.num_accepted_tokens += checked.num_accepted_tokens
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs
            sources = iteration.prompt_token_stats
            self.num_prompt_tokens_computed += sources.computed
            self.num_prompt_tokens_cached += sources.local_cache_hit
            self.num_prompt_tokens_pulled += sources.external_kv_transfer

    def logger_factory(self) -> Any:
        """A class of loggers that write to this view. vLLM makes one logger per engine.

        The class is a StatLoggerFactory of vLLM.
        """
        from vllm.v1.metrics.loggers import StatLoggerBase

        view = self

        class ViewLogger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                view.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return ViewLogger
