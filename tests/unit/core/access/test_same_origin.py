"""Requests that a page of another site may have sent are refused."""

from __future__ import annotations

import pytest

from pdmesh.core.access.same_origin import check_same_origin
from pdmesh.errors import NotAllowed

JSON = {"content-type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    ("headers", "has_token"),
    [
        ({**JSON, "host": "localhost:9000"}, False),
        ({**JSON, "host": "127.0.0.1:9000", "origin": "http://127.0.0.1:9000"}, False),
        ({**JSON, "host": "[::1]:9000"}, False),
        ({**JSON, "host": "[::1]"}, False),
        ({**JSON, "host": "mesh.example.org", "origin": "https://mesh.example.org"}, True),
    ],
)
def test_our_own_page_and_other_programs_may_ask(headers: dict[str, str], has_token: bool) -> None:
    check_same_origin(headers, has_token=has_token)


@pytest.mark.parametrize(
    ("headers", "has_token", "why"),
    [
        ({"host": "localhost:9000"}, False, "content type"),
        ({"content-type": "text/plain", "host": "localhost:9000"}, True, "content type"),
        ({**JSON, "host": "localhost:9000", "origin": "http://evil.org"}, False, "another site"),
        ({**JSON, "host": "localhost:9000", "origin": "null"}, True, "another site"),
        ({**JSON, "host": "evil.org:9000", "origin": "http://evil.org:9000"}, False, "loopback"),
        (JSON, False, "loopback"),
    ],
)
def test_what_another_page_may_have_sent_is_refused(
    headers: dict[str, str], has_token: bool, why: str
) -> None:
    with pytest.raises(NotAllowed, match=why):
        check_same_origin(headers, has_token=has_token)
