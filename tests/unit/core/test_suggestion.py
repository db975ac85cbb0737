"""An error about an unknown name suggests a similar known one."""

from __future__ import annotations

from pdmesh.core.suggestion import suggestion

NAMES = ["decode-0", "decode-1", "prefill-0"]


def test_a_close_name_is_suggested() -> None:
    assert suggestion("decoed-0", NAMES) == "; did you mean decode-0?"
    assert suggestion("perfill-0", NAMES) == "; did you mean prefill-0?"


def test_nothing_is_suggested_for_a_name_that_is_like_none() -> None:
    assert suggestion("gateway", NAMES) == ""
    assert suggestion("x", []) == ""
