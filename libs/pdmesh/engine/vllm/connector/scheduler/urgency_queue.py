"""A queue of waiting requests in order of urgency, for vLLM's policy `priority`.

vLLM's own queue orders by priority first, so requests of a low priority may wait forever. This
queue orders by turn, which is a request's arrival plus a time that depends on its priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from pdmesh.core.instance.urgency import Urgency

_Entry = tuple[float, int, Request]


def urgency_of(request: Request) -> Urgency:
    return Urgency(request.priority, request.arrival_time)


class UrgencyQueue(RequestQueue):
    """A heap ordered by turn.

    Requests with equal turns stay in the order in which they were added.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._num_added = 0

    def add_request(self, request: Request) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (urgency_of(request).turn_at, self._num_added, request))

    def pop_request(self) -> Request:
        """Raises IndexError if the queue is empty."""
        return heapq.heappop(self._heap)[2]

    def peek_request(self) -> Request:
        """Raises IndexError if the queue is empty."""
        return self._heap[0][2]

    def prepend_request(self, request: Request) -> None:
        """Insert the request by its turn, not at the front."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests in order of turn, and removes none."""
        return (request for _, _, request in sorted(self._heap, key=lambda entry: entry[:2]))
