"""vLLM's scheduler, which proposes fewer or more tokens per step as fewer or more are right (S118).

vLLM reads the number of tokens to propose from a table by batch size, which it makes once. This
scheduler replaces the table before each step, and reports the checked tokens to the core.
"""

from __future__ import annotations

from typing import Any

from pdmesh.core.speculation.schedule import AdaptiveSpeculation, Speculation
from pdmesh.engine.vllm.connector.scheduler.timed_scheduler import TimedScheduler


class AdaptiveScheduler(TimedScheduler):
    """Any: arguments and results of vLLM's scheduler, passed on unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        told = self.vllm_config.kv_transfer_config.kv_connector_extra_config["speculation"]
        self._speculation = AdaptiveSpeculation(
            Speculation(**told), self.scheduler_config.max_num_seqs
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.dynamic_sd_lookup = self._speculation.counts()
        return super().schedule(*args, **kwargs)

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any
    ) -> Any:
        self._speculation.checked(num_draft_tokens, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            stats, num_draft_tokens, num_accepted_tokens, **kwargs
        )
