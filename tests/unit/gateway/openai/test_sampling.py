"""Every sampling parameter that a client gives is used."""

from __future__ import annotations

import inspect
import re

from pdmesh.services.gateway.openai import sampling


def test_each_field_that_the_slow_path_reads_makes_a_request_take_that_path() -> None:
    """If `_FURTHER` lacked a field, that field would be ignored without an error."""
    read = re.findall(r"\brequest\.(\w+)", inspect.getsource(sampling._with_further))
    assert set(read) == set(sampling._FURTHER)
