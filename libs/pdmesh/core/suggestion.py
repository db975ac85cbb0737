"""Suggests the known name that a person may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: str, known: Iterable[str]) -> str:
    """A text to append to an error message, such as `; did you mean decode-0?`.

    The text is empty if no known name is close.
    """
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
