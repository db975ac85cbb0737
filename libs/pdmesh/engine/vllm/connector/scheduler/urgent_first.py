"""vLLM's scheduler, changed so that a running prompt stands back for a more urgent one (S83).

vLLM's policy `priority` orders the waiting requests, and preempts the least urgent running request
if blocks are lacking. But a prompt that has begun takes all tokens of each step until it is
computed, even if a more urgent request waits. Here, the running prompt gets no tokens in a step in
which a more urgent request can begin. A request's urgency depends on its priority and its arrival.
With the policy `fcfs`, or if all requests have the same priority, this scheduler does the same as
vLLM's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from pdmesh.core.instance.urgency import has_several_classes
from pdmesh.engine.vllm.connector.scheduler.urgency_queue import UrgencyQueue, urgency_of


class UrgentFirstScheduler(Scheduler):
    """The type of arguments and results is Any because they are vLLM's, passed on unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_classes = self.policy is SchedulingPolicy.PRIORITY
        if self._has_classes:
            self.waiting = UrgencyQueue()
            self.kv_holding_waiting = UrgencyQueue()
        self._was_in_vain = False  # whether prompts stood back in the last step without effect

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        urgent = None
        if self._has_classes and self.running:
            self._order_running()
            urgent = None if self._was_in_vain else self._next_to_begin()
            if urgent is not None:
                self._stand_back_for(urgent)
        step = super().schedule(*args, **kwargs)
        # vLLM may have another reason not to begin the urgent request. In that case, no prompt
        # stands back in the next step.
        self._was_in_vain = urgent is not None and urgent.status is not RequestStatus.RUNNING
        return step

    def _order_running(self) -> None:
        """Sort the running requests: answers first, because they take few of a step's tokens.

        Prompts follow, in order of urgency.
        """
        if has_several_classes(request.priority for request in self.running):
            self.running.sort(
                key=lambda r: (r.is_prefill_chunk, urgency_of(r).turn_at * r.is_prefill_chunk)
            )

    def _next_to_begin(self) -> Request | None:
        """The waiting request that this step would begin if running prompts left it tokens.

        None if there is no such request, or if the blocks for it are not free.
        """
        if len(self.running) >= self.max_num_active_reqs:
            return None
        if all(not (r.is_prefill_chunk and r.priority) for r in self.running):
            return None  # all running prompts are of the most urgent class, so none may stand back
        for queue in (self.kv_holding_waiting, self.waiting):
            ready = next((request for request in queue if self._is_ready(request)), None)
            if ready is not None:
                return ready if self._has_room(ready) else None
        return None

    def _is_ready(self, request: Request) -> bool:
        """False for a request that waits for its KV, its grammar or its first token."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            has_kv: bool = request.request_id in self.finished_recving_kv_req_ids
            return has_kv
        return request not in self.deferred_waiting

    def _has_room(self, request: Request) -> bool:
        """Whether enough blocks are free for the request.

        If not, it would not help that a prompt stands back: only running requests can free blocks.
        """
        num_lacking: int = request.num_tokens - request.num_computed_tokens
        block_size: int = self.block_size
        num_free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return -(-num_lacking // block_size) <= num_free

    def _stand_back_for(self, urgent: Request) -> None:
        """Let vLLM skip less urgent prompts in this step, by making them eligible only later."""
        waiting = urgency_of(urgent)
        for request in self.running:
            if request.is_prefill_chunk and urgency_of(request).stands_back_for(waiting):
                request.next_decode_eligible_step = self.current_step + 2
