"""The prompts that the simulated engine computes, in chunks.

Each step computes one chunk of bounded size. More urgent prompts get the chunk's tokens first
(S83). A leg is a request's stay on this engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.instance.urgency import Urgency
from pdmesh.engine.base import PrefillJob
from pdmesh.engine.sim.model import Words


@dataclass(slots=True)
class PromptUnderWay:
    """One prompt in the queue. Its first `num_cached` tokens were found in the prefix cache."""

    job: PrefillJob
    blocks: list[int]
    num_cached: int
    urgency: Urgency
    num_computed: int = 0  # tokens computed after the cached ones
    num_in_chunk: int = 0  # tokens in the current step's chunk
    states: Words | None = None  # the states of all the prompt's tokens; None until needed

    @property
    def num_left(self) -> int:
        return len(self.job.prompt) - self.num_cached - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The amounts of a step's work that determine the step's time."""

    num_tokens: int = 0
    num_before: int = 0  # tokens of a prompt before the chunk, as a mean over the chunk's prompts
    batch: int = 0  # prompts with tokens in the chunk
    longest: int = 0  # most tokens of one prompt in the chunk


@dataclass(slots=True)
class PrefillQueue:
    chunk_tokens: int
    _prompts: dict[int, PromptUnderWay] = field(default_factory=dict)  # by leg

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: PromptUnderWay) -> bool:
        return self._prompts.get(prompt.job.leg) is prompt

    def in_chunk(self) -> list[PromptUnderWay]:
        """Prompts that have tokens in the current step."""
        return [prompt for prompt in self._prompts.values() if prompt.num_in_chunk]

    def add(self, prompt: PromptUnderWay) -> None:
        self._prompts[prompt.job.leg] = prompt

    def remove(self, leg: int) -> PromptUnderWay | None:
        return self._prompts.pop(leg, None)

    def next_chunk(self) -> Chunk:
        """Give the next step's tokens to the prompts, in the order of their turns.

        A prompt's turn is its arrival plus a time for its priority.
        """
        budget, before, batch, longest = self.chunk_tokens, 0, 0, 0
        for prompt in sorted(self._prompts.values(), key=lambda p: p.urgency.turn_at):
            prompt.num_in_chunk = min(budget, prompt.num_left)
            if prompt.num_in_chunk == 0:
                break
            budget -= prompt.num_in_chunk
            before += prompt.num_cached + prompt.num_computed
            batch += 1
            longest = max(longest, prompt.num_in_chunk)
        return Chunk(self.chunk_tokens - budget, before // max(batch, 1), batch, longest)

    def finish_chunk(self) -> list[PromptUnderWay]:
        """Count the chunk as computed. Removes and returns the prompts that are complete."""
        done: list[PromptUnderWay] = []
        for prompt in self._prompts.values():
            if prompt.num_in_chunk == 0:
                continue
            prompt.num_computed += prompt.num_in_chunk
            prompt.num_in_chunk = 0
            if prompt.num_left == 0:
                done.append(prompt)
        for prompt in done:
            del self._prompts[prompt.job.leg]
        return done
