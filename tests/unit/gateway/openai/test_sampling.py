"""How the answers to a request are drawn: nothing that a client gives is left out."""

from __future__ import annotations

import inspect
import re

from pdmesh.services.gateway.openai import sampling


def test_each_field_that_the_slow_path_reads_makes_a_request_take_that_path() -> None:
    """Otherwise the field would be ignored without a word."""
    read = re.findall(r"\brequest\.(\w+)", inspect.getsource(sampling._with_further))
    assert set(read) == set(sampling._FURTHER)
