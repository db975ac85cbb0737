"""Messages that the parser accepts although RFC 9112 says to refuse them."""

from __future__ import annotations

import pytest

from pdmesh.httpd.message_rules import refusal

HOST = (b"host", b"mesh.example:8000")


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", [HOST], 0),
        ("1.0", [HOST], 0),
        ("1.0", [], 0),
        ("1.1", [(b"host", b"")], 0),
        ("1.1", [(b"host", b"[::1]:80")], 0),
        ("1.1", [HOST, (b"transfer-encoding", b"Chunked")], 0),
        ("1.1", [], 400),
        ("1.1", [HOST, HOST], 400),
        ("1.0", [HOST, (b"host", b"other")], 400),
        ("1.1", [(b"host", b"a b")], 400),
        ("1.1", [(b"host", b"user@mesh.example")], 400),
        ("1.1", [(b"host", b"mesh.example/v1")], 400),
        ("1.1", [(b"host", b"a, b")], 400),
        ("2.0", [HOST], 505),
        ("0.9", [], 505),
        ("1.0", [HOST, (b"transfer-encoding", b"chunked")], 400),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], 501),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")], 501),
    ],
)
def test_a_head_is_refused_as_the_rfc_requires(
    version: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    assert refusal(version, headers) == status
