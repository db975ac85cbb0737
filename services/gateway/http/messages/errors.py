"""Errors in the form of Anthropic's API, in which only the message can name the field."""

from __future__ import annotations

from typing import Final

import msgspec

from pdmesh.errors import MeshError
from pdmesh.services.gateway.access.errors import NoApiKey
from pdmesh.services.gateway.http.errors import ErrorFormat

_encode: Final = msgspec.json.encode
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: MeshError, request_id: str = "") -> bytes:
    """{"type": "error", "error": {type, message}, "request_id"}"""
    message = error.message
    if isinstance(error, NoApiKey):  # clients of this API send the key in x-api-key
        message += ", or x-api-key: <key>"
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    kind = _TYPES.get(error.http_status, "api_error")
    body: dict[str, object] = {"type": "error", "error": {"type": kind, "message": message}}
    if request_id:
        body["request_id"] = request_id
    return _encode(body)


def error_event(error: MeshError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error)


ANTHROPIC_ERRORS: Final = ErrorFormat(error_body, error_event, (b"x-request-id", b"request-id"))
