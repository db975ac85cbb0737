"""Decides how many tokens an ended call is charged to its tenant.

A call that no instance took costs nothing, and so does one whose client got only an error. One that
fails later costs its prompts and what its client got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceUse:
    """What became of one answer. `num_taken`: the tokens that its client has or will get."""

    num_tokens: int
    num_taken: int
    was_accepted: bool
    has_failed: bool


def tokens_of_answers(
    num_prompt_tokens: int, choices: Sequence[ChoiceUse], *, is_void: bool
) -> int:
    """For a call that makes answers. `is_void`: its client got nothing but an error."""
    if is_void or not any(choice.was_accepted for choice in choices):
        return 0
    if any(choice.has_failed for choice in choices):
        return num_prompt_tokens + sum(choice.num_taken for choice in choices)
    return num_prompt_tokens + sum(choice.num_tokens for choice in choices)


def tokens_of_inputs(outcome: str, lengths: Sequence[int], begun: Iterable[int]) -> int:
    """For a call that makes vectors or scores; a client that leaves pays for what was begun.

    `outcome`: completed, failed or cancelled; `begun`: the places of inputs that instances took.
    """
    if outcome == "completed":
        return sum(lengths)
    if outcome == "failed":
        return 0
    return sum(lengths[place] for place in set(begun))
