"""Decides how many tokens of an ended call are charged to its tenant.

A call costs nothing if no instance accepted it, or if its client got only an error. If a call fails
later, it costs its prompts and the tokens that its client got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceUse:
    """The use of one of a call's answers.

    `num_taken` counts the tokens that the client has got or will get.
    """

    num_tokens: int
    num_taken: int
    was_accepted: bool
    has_failed: bool


def tokens_of_answers(
    num_prompt_tokens: int, choices: Sequence[ChoiceUse], *, is_void: bool
) -> int:
    """The tokens to charge for a call that makes answers.

    `is_void` means that the client got only an error.
    """
    if is_void or not any(choice.was_accepted for choice in choices):
        return 0
    if any(choice.has_failed for choice in choices):
        return num_prompt_tokens + sum(choice.num_taken for choice in choices)
    return num_prompt_tokens + sum(choice.num_tokens for choice in choices)


def tokens_of_inputs(outcome: str, lengths: Sequence[int], begun: Iterable[int]) -> int:
    """The tokens to charge for a call that makes vectors or scores.

    `outcome` is completed, failed or cancelled. `begun` has the positions of the inputs that
    instances accepted. A client that cancels the call pays for these.
    """
    if outcome == "completed":
        return sum(lengths)
    if outcome == "failed":
        return 0
    return sum(lengths[place] for place in set(begun))
