"""Decides how many tokens an answer may have: those that the client asks for, else the model's or
the gateway's default, and never more than the model's context leaves after the prompt.
"""

from __future__ import annotations


def max_answer_tokens(asked: int | None, default: int, room: int) -> int | None:
    """None: the client asks for more than there is room for, and its request is refused.

    `room`: the tokens that the context leaves, at least one. `default` counts if the client asks
    for no number; an answer that reaches the end of the room is then cut, and not refused.
    """
    assert room > 0
    if asked is None:
        return min(default, room)
    return asked if asked <= room else None
