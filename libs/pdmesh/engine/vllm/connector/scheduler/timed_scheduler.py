"""vLLM's schedulers, extended to record when a step is scheduled and processed (S139, S140).

One rank, the first of the last pipeline stage, records when it computes each step. These times
arrive with the output of a later step. All processes of an engine run on one machine, so they share
a clock. `StepTimes` sums the times up. The sums reach the instance's process with vLLM's own
statistics of a step.
"""

from __future__ import annotations

import time
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from pdmesh.core.instance.step_times import StepTimes
from pdmesh.engine.vllm.connector.scheduler.step_news import StepNews
from pdmesh.engine.vllm.connector.scheduler.urgent_first import UrgentFirstScheduler
from pdmesh.engine.vllm.host.stats import STEP_TOTALS


class TimedScheduler(UrgentFirstScheduler):
    """The type of arguments and results is Any because they are vLLM's, passed on unchanged."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times: Final = StepTimes()
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            # Without a table, vLLM proposes tokens with the id -1 for a request that begins to
            # decode. vLLM's CPU kernel would read -1 as an index, and could accept the tokens.
            size = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * size

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        step = super().schedule(*args, **kwargs)
        if step.total_num_scheduled_tokens:
            is_steady = not (step.scheduled_new_reqs or step.finished_req_ids)
            self._times.scheduled(begin, time.monotonic(), is_steady=is_steady)
        return step

    def update_from_output(self, step: Any, output: Any) -> Any:
        begin = time.monotonic()
        news = getattr(output.kv_connector_output, "kv_connector_worker_meta", None)
        if isinstance(news, StepNews):
            for computed in news.computed:
                self._times.computed(computed)
        outputs = super().update_from_output(step, output)
        if step.total_num_scheduled_tokens:
            self._times.processed(begin, time.monotonic())
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.kv_connector_stats = {STEP_TOTALS: self._times.totals.numbers()}
        return stats


class TimedAsyncScheduler(TimedScheduler, AsyncScheduler):
    """A TimedScheduler on top of vLLM's asynchronous scheduler, which schedules one step ahead.

    When a request ends, the next step may already compute it. `num_tokens_past_end` counts the
    tokens that are computed in vain.
    """

    def update_from_output(self, step: Any, output: Any) -> Any:
        self._times.totals.num_tokens_past_end += sum(
            count for key, count in step.num_scheduled_tokens.items() if self._has_ended(key)
        )
        return super().update_from_output(step, output)

    def _has_ended(self, key: str) -> bool:
        request = self.requests.get(key)
        return request is None or request.is_finished()
