"""vLLM's scheduler, changed to adapt the number of tokens that speculation proposes (S118).

With speculation, an engine proposes tokens and checks them in one step. How many tokens it should
propose depends on how many were right so far, and on the time that checking takes. vLLM looks the
number up by batch size in a table, which it fills only once. This scheduler replaces the table
before each step. `AdaptiveSpeculation` computes the table from the numbers of checked and accepted
tokens, and from the durations of steps that computed no prompt. This scheduler is used without
asynchronous scheduling, so a step has ended when vLLM processes its output.
"""

from __future__ import annotations

import time
from typing import Any

from pdmesh.core.speculation.proposal_length import AdaptiveSpeculation, Speculation
from pdmesh.engine.vllm.connector.scheduler.timed_scheduler import TimedScheduler


class AdaptiveScheduler(TimedScheduler):
    """The type of arguments and results is Any because they are vLLM's, passed on unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        told = self.vllm_config.kv_transfer_config.kv_connector_extra_config["speculation"]
        self._speculation = AdaptiveSpeculation(
            Speculation(**told), self.scheduler_config.max_num_seqs
        )
        self._began = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.dynamic_sd_lookup = self._speculation.counts()
        self._began = time.monotonic()
        return super().schedule(*args, **kwargs)

    def update_from_output(self, step: Any, output: Any) -> Any:
        counts = step.num_scheduled_tokens.values()
        if counts and max(counts) <= 1 + self.num_spec_tokens and not step.scheduled_new_reqs:
            self._speculation.computed(sum(counts), time.monotonic() - self._began)
        return super().update_from_output(step, output)

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any
    ) -> Any:
        self._speculation.checked(num_draft_tokens, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            stats, num_draft_tokens, num_accepted_tokens, **kwargs
        )
