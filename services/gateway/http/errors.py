"""The error format of each API: the body of an error response, and the event of a failed stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from pdmesh.errors import MeshError

_encode: Final = msgspec.json.encode
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """`request_id_headers` are the headers that carry the request's id in every response."""

    body: Callable[[MeshError, str], bytes]
    event: Callable[[MeshError], bytes]
    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)


def error_body(error: MeshError, request_id: str = "") -> bytes:
    """{"error": {message, type, param, code}}"""
    return _encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(error.http_status, "server_error"),
                "param": error.field,
                "code": error.reason.lower(),
            }
        }
    )


def error_chunk(error: MeshError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


OPENAI_ERRORS: Final = ErrorFormat(error_body, error_chunk)
