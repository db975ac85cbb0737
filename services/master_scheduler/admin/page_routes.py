"""Serves the operators' page, and AdminService as JSON over HTTP, with the same checks as gRPC.

A call is POST /admin/<method> with a JSON request. Before a page of another site can send such a
request, the browser asks this server for permission (CORS), which the server never gives. If no
admin token is set, the request's host must be localhost or a loopback address. This stops a page
whose own host name was made to resolve to this server (DNS rebinding).

The port has no TLS and asks for no certificate. So if gRPC asks for an operator's certificate, this
port serves only calls from this machine, unless PDMESH_INSECURE_NETWORK is set.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.json_format import MessageToDict, Parse, ParseError
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.core.access.same_origin import check_same_origin
from pdmesh.desired_file import MAX_BYTES
from pdmesh.errors import InvalidRequest, MeshError, NotAllowed
from pdmesh.services.master_scheduler.admin.callers import is_local
from pdmesh.services.master_scheduler.admin.checked_calls import CheckedCalls
from pdmesh.v1 import admin_service_pb2

log = structlog.get_logger(__name__)

_FILES: Final = Path(__file__).with_name("page")
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_MAX_BODY: Final = 2 * MAX_BYTES  # enough for the longest desired state with a `\n` for every byte
_MAX_READING: Final = 8  # how many bodies are read at once; further requests wait
_SERVICE: Final = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


_LOCAL_ONLY: Final = (
    "with PDMESH_TLS_DIR this page serves only calls from this machine: tunnel to its port "
    "(ssh -L, kubectl port-forward), use pdmesh with an operator's certificate, or set "
    "PDMESH_INSECURE_NETWORK=true on a network that you trust"
)


class _Caller:
    """Stands in for a gRPC context. It shows who sent an HTTP request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._request.headers.items())

    def auth_context(self) -> dict[str, list[bytes]]:
        """Empty, because browsers send no certificate of the mesh."""
        return {}

    def host(self) -> str:
        return self._request.client.host if self._request.client is not None else ""

    def peer(self) -> str:
        client = self._request.client
        if client is None:
            return ""
        host = f"[{client.host}]" if ":" in client.host else client.host
        return f"ipv{6 if ':' in client.host else 4}:{host}:{client.port}"


def page_routes(
    calls: CheckedCalls, *, has_token: bool, only_host: str | None = None
) -> list[Route]:
    """The routes of the page and of the calls.

    If `only_host` is set, only callers on this machine are served. Their address must be
    `only_host` or a loopback address.
    """
    reading = asyncio.Semaphore(_MAX_READING)

    async def call(request: Request) -> Response:
        try:
            check_same_origin(request.headers, has_token=has_token)
            method = _SERVICE.methods_by_name.get(request.path_params["method"])
            if method is None:
                return _error(InvalidRequest("there is no such method"), 404)
            caller: Any = _Caller(request)
            if only_host is not None and not _is_here(caller, only_host):
                raise NotAllowed(_LOCAL_ONLY)
            await calls.check_access(method.name, caller)  # before the body is read
            empty = GetMessageClass(method.input_type)()
            async with reading:
                # Parse in a thread, because protobuf needs seconds for the longest JSON.
                message = await asyncio.to_thread(Parse, await _body(request), empty)
            answer = await getattr(calls, method.name)(message, caller)
            return await asyncio.to_thread(_answer, answer)
        except ParseError as exc:
            return _error(InvalidRequest(f"not a valid request: {exc}"))
        except MeshError as exc:
            return _error(exc)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:  # the log gets the cause, but the caller does not
            log.exception("page.bug")
            return _error(MeshError("internal error; the server's log has the cause"))

    def show(path: Path) -> Route:
        content, kind = path.read_bytes(), _TYPES[path.suffix]

        async def shown(_: Request) -> Response:
            return Response(content, media_type=kind, headers=_HEADERS)

        name = path.relative_to(_FILES).as_posix()
        return Route("/" if name == "page.html" else f"/page/{name}", shown)

    files = sorted(path for path in _FILES.rglob("*") if path.suffix in _TYPES)
    return [*map(show, files), Route("/admin/{method}", call, methods=["POST"])]


def _is_here(caller: _Caller, own_host: str) -> bool:
    return is_local(caller.peer()) or caller.host() == own_host.strip("[]")


async def _body(request: Request) -> bytes:
    """Read the body. Raises InvalidRequest if it has more than `_MAX_BODY` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise InvalidRequest(f"more than {_MAX_BODY} bytes")
    return bytes(body) or b"{}"


def _answer(message: Any) -> Response:
    """The message as JSON. It includes default values, so that the page need not know them."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return JSONResponse(found, headers={"Cache-Control": "no-store"})


def _error(exc: MeshError, status: int = 0) -> Response:
    error = {"reason": exc.reason, "message": exc.message, "field": exc.field}
    return JSONResponse({"error": error}, status_code=status or exc.http_status)
