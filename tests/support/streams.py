"""Streaming clients, and a strict check of how each stream ended."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class StreamOutcome:
    """What one client received. Times are seconds on the monotonic clock."""

    prompt: Sequence[int]
    started_at: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # only if the request asks for token IDs
    finish_reason: str | None = None
    is_done: bool = False  # [DONE] has arrived
    error: dict[str, Any] | None = None  # the error of a response or of an event
    status: int = 0
    retry_after: str | None = None  # the Retry-After header of a refusal
    was_cut: bool = False  # the connection ended without [DONE] or an error
    first_at: float | None = None
    ended_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.is_done and self.error is None and self.finish_reason is not None

    @property
    def longest_gap_s(self) -> float:
        marks = [self.started_at, *self.arrivals, self.ended_at]
        return max(b - a for a, b in itertools.pairwise(marks))

    def fault_in_ending(self) -> str:
        """What is wrong with the end of the stream. Empty if nothing is.

        A stream must end with the whole text, with exactly one clear error, or with a cut
        connection.
        """
        endings = [self.is_complete, self.error is not None, self.was_cut]
        if sum(endings) != 1:
            return f"ended in {sum(endings)} ways: {self}"
        if self.error is not None and not self.error.get("message"):
            return f"an error without a message: {self.error}"
        return ""


async def stream_completion(
    client: httpx.AsyncClient,
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    under_way: list[StreamOutcome] | None = None,
    **more: object,
) -> StreamOutcome:
    """Send a streamed /v1/completions request, and read it to its end.

    The outcome is added to `under_way` at once, and grows with the stream. `more` are further
    fields of the request.
    """
    outcome = StreamOutcome(prompt=prompt, started_at=time.monotonic())
    if under_way is not None:
        under_way.append(outcome)
    body = {
        "model": "default",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **more,
    }
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            outcome.status = response.status_code
            if response.status_code != httpx.codes.OK:
                outcome.retry_after = response.headers.get("retry-after")
                outcome.error = json.loads(await response.aread())["error"]
            else:
                await _read_events(response, outcome)
    except httpx.HTTPError:
        outcome.was_cut = True
    outcome.ended_at = time.monotonic()
    if not (outcome.is_done or outcome.error is not None):
        outcome.was_cut = True
    return outcome


def num_begun(outcomes: Sequence[StreamOutcome]) -> int:
    """The number of streams that have got their first token."""
    return sum(outcome.first_at is not None for outcome in outcomes)


async def _read_events(response: httpx.Response, outcome: StreamOutcome) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            outcome.is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            outcome.error = event["error"]
            continue
        now = time.monotonic()
        outcome.first_at = outcome.first_at or now
        outcome.arrivals.append(now)
        for choice in event["choices"]:
            outcome.text += choice["text"]
            outcome.token_ids += choice.get("token_ids", ())
            outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
