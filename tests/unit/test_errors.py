"""An error's text may quote only a bounded part of the caller's input.

Errors are sent over HTTP and gRPC, and are written to logs and events.
"""

from __future__ import annotations

import pytest
from google.rpc.error_details_pb2 import BadRequest

from pdmesh.errors import MAX_FIELD_BYTES, MAX_MESSAGE_BYTES, InvalidRequest, MeshError, shortened
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.http.errors import error_body


@pytest.mark.parametrize("text", ["a", "é", "🚀", "\ud800", "\x7f", '"'])
def test_no_error_is_longer_than_its_bounds_in_any_output(text: str) -> None:
    kinds: list[type[MeshError]] = [MeshError, *MeshError.__subclasses__()]
    for kind in kinds:
        error = kind(text * 1_000_000, field=text * 1_000_000)
        assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
        assert len((error.field or "").encode()) <= MAX_FIELD_BYTES
        assert str(error) == error.message
        assert len(error_body(error)) < 8000
        status = rpc.to_status(error)
        assert status.ByteSize() < 4096, "with its message, it fits into 8 KiB of metadata"
        bad = BadRequest()
        assert status.details[1].Unpack(bad)


def test_a_text_within_the_bounds_is_not_changed() -> None:
    assert shortened("x" * 64) == "x" * 64
    assert shortened("x" * 65) == "x" * 61 + "…"
    assert shortened("é" * 40) == "é" * 30 + "…"
    error = InvalidRequest("é" * 512, field="f")
    assert (error.message, error.field) == ("é" * 512, "f")
