"""All ids of one request are mapped to the same key."""

from __future__ import annotations

import pytest

from pdmesh.core.history.ended_request import key_of

HEX = "0123456789abcdef01234567"


@pytest.mark.parametrize("shown", [HEX, f"req-{HEX}", f"chatcmpl-{HEX}", f"msg_{HEX}"])
def test_every_form_of_an_id_has_one_key(shown: str) -> None:
    assert key_of(shown) == HEX


def test_an_id_of_another_form_is_its_own_key() -> None:
    assert key_of("mine") == "mine"
