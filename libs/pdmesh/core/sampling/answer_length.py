"""Decides how many tokens an answer may have.

The client's number is used if there is one, else the default of the model or the gateway. An answer
never has more tokens than the model's context leaves after the prompt.
"""

from __future__ import annotations


def max_answer_tokens(asked: int | None, default: int, room: int) -> int | None:
    """The most tokens of an answer, or None if the client asks for too many and must be refused.

    `room` is how many tokens the context leaves, at least one. `default` is used if the client asks
    for no number. In that case, an answer that needs more than `room` is cut, and not refused.
    """
    assert room > 0
    if asked is None:
        return min(default, room)
    return asked if asked <= room else None
