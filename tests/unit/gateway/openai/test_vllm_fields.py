"""The table in docs/api.md has every field of vLLM's requests, in the right row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    unsupported_fields,
)

_PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
_TABLE = _PAGE.partition("### vLLM's fields")[2].partition("\n### ")[0]


def told(row: str) -> set[str]:
    """The fields that a row of the table names."""
    line = next(line for line in _TABLE.splitlines() if line.startswith(f"| {row} "))
    return set(re.findall(r"`(\w+)`", line.split("|")[2]))


@pytest.mark.parametrize("struct", [ChatCompletionRequest, CompletionRequest])
def test_the_table_is_right_about_each_field(
    struct: type[ChatCompletionRequest | CompletionRequest],
) -> None:
    name = "chat" if struct is ChatCompletionRequest else "completion"
    known, refused = set(struct.__struct_fields__), set(unsupported_fields(struct))
    assert told(f"{name}: taken") <= known - refused
    assert told(f"{name}: refused") <= refused
    assert not told(f"{name}: ignored") & known


def test_no_field_stands_in_two_rows() -> None:
    for name in ("chat", "completion"):
        rows = [told(f"{name}: {row}") for row in ("taken", "refused", "ignored")]
        assert all(rows)
        assert sum(map(len, rows)) == len(set.union(*rows))
