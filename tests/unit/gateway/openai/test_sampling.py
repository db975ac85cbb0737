"""How the answers to a request are drawn: nothing that a client gives is left out."""

from __future__ import annotations

import inspect
import re

from pdmesh.services.gateway.openai import sampling


def test_every_further_field_that_is_read_is_looked_for_first() -> None:
    """A field that only the slow path knows would be ignored without a word."""
    read = re.findall(r"\brequest\.(\w+)", inspect.getsource(sampling._with_further))
    assert set(read) == set(sampling._FURTHER)
