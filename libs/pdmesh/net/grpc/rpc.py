"""The mesh's gRPC channels and servers. All services make their channels and servers here.

There are two reasons. First, grpcio's documented keepalive does not notice a frozen peer, unless
`grpc.http2.ping_timeout_ms` is set on both sides. Second, grpcio answers a malformed request with
UNKNOWN and the parser's text. This module parses requests itself and answers INVALID_ARGUMENT. It
also sends MeshErrors as gRPC statuses, and converts them back on the other side.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from pdmesh import errors
from pdmesh.errors import InvalidRequest, MeshError, UntrustedPeer
from pdmesh.net.grpc.mesh_token import TokenChannel, TokenCheck
from pdmesh.net.grpc.peers import check_caller
from pdmesh.net.grpc.proto_bounds import check_num_fields
from pdmesh.net.grpc.secure_channel import SecureChannel
from pdmesh.net.tls.own_certificate import own_certificates
from pdmesh.v1.common_pb2 import InstanceRecord

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder, Certificates

log = structlog.get_logger(__name__)
Check = Callable[[grpc.aio.ServicerContext[Any, Any]], None]  # raises if the caller may not call

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024  # for calls between the mesh's services
_STATUS_DETAILS: Final = "grpc-status-details-bin"
_DOMAIN: Final = "pdmesh"
# The limit per server. Each connection takes a file descriptor. A process without free descriptors
# cannot reach NATS, and a master would then lose its lease.
_MAX_CONNECTIONS: Final = 1024
_HANDSHAKE_MS: Final = 20_000  # from connecting to the first SETTINGS frame; the default is 120 s

# A ping is sent every 2 s, also on idle connections. A peer that does not answer a ping for 1 s is
# taken for gone. By default, gRPC sends no pings.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_CHANNEL: Final = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This also bounds the time of each attempt to connect. 100 ms is too short on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)
_NAME: Final = "grpc.ssl_target_name_override"
# The error text of gRPC when a server's certificate is not accepted.
_UNVERIFIED: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
# The error texts of gRPC for a missed keepalive, and of the kernel for unacknowledged data.
_SILENCE: Final = re.compile(
    "ping timeout|keepalive|timed out|no route to host|unreachable", re.IGNORECASE
)
_MISNAMED: Final = "Hostname Verification Check failed"

_ERRORS_BY_CODE: Final[dict[str, type[MeshError]]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "UNAUTHENTICATED": errors.InvalidToken,
    "PERMISSION_DENIED": errors.NotAllowed,
    "NOT_FOUND": errors.ModelNotFound,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "FAILED_PRECONDITION": errors.Draining,
    "ABORTED": errors.StalePlan,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNAVAILABLE": errors.Unavailable,
}


class _Credential:
    """The mesh token of this process. It is empty if the mesh has no token."""

    token = ""


def use_mesh_token(token: str) -> None:
    """Set the token that `channel` sends and `server` requires from now on.

    Call it once, before the first channel or server is made.
    """
    _Credential.token = token


def mesh_token() -> str:
    return _Credential.token


def channel_to(record: InstanceRecord, mesh_token: str | None = None) -> grpc.aio.Channel:
    """A channel to a registered process, as `channel` makes it.

    With mutual TLS, the server's certificate must name the registered process.
    """
    own, name = own_certificates(), ""
    if own is not None:
        peer = replace(own.identity, role=record.service, instance_id=record.instance_id)
        name = peer.dns_name
    return channel(record.grpc_address, mesh_token, name)


def channel(address: str, mesh_token: str | None = None, name: str = "") -> grpc.aio.Channel:
    """A channel that reports a dead or frozen peer within 3 s, and reconnects fast.

    The channel sends `mesh_token`, by default this process's token. It sends no token if that is
    empty. It ignores the environment's proxy settings, which are for traffic that leaves the mesh.
    If this process has certificates, the channel uses mutual TLS. The server's certificate must
    then have `name`, by default the host of the address.
    """
    token = _Credential.token if mesh_token is None else mesh_token
    own = own_certificates()
    made = _plain(address) if own is None else _secure(own, address, name)
    return TokenChannel(made, token) if token else made


def _plain(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_CHANNEL)


def _secure(own: CertificateFolder, address: str, name: str) -> grpc.aio.Channel:
    options = (*_CHANNEL, (_NAME, name)) if name else _CHANNEL

    def make(latest: Certificates) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, _client_side(latest), options=options)

    return SecureChannel(own, make)


def _client_side(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        certificates.authorities, certificates.key, certificates.chain
    )


def server(
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    is_public: bool = False,
    max_connections: int | None = None,
    reuse_port: bool = False,
    options: Sequence[tuple[str, int]] = (),
    interceptors: Sequence[Any] = (),  # grpc-stubs and grpc.aio disagree on their type
) -> grpc.aio.Server:
    """A server that cancels the handlers of a dead or frozen client within 3 s.

    `options` are further options of gRPC. If this process has a mesh token, every caller must send
    the token, unless the server `is_public`.
    """
    token = "" if is_public else _Credential.token
    return grpc.aio.server(
        interceptors=[*([TokenCheck(token, fail)] if token else []), *interceptors],
        options=(
            *_KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", max_connections or _MAX_CONNECTIONS),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", int(reuse_port)),
            *options,
        ),
    )


def listen(target: grpc.aio.Server, address: str, *, certified: bool = True) -> int:
    """Listen for the mesh's own processes, and return the port.

    If this process has certificates, the port uses TLS. With `certified`, callers must also show a
    certificate of the same authorities. Raises RuntimeError if the address cannot be used.
    """
    certificates = own_certificates()
    if certificates is None:
        return target.add_insecure_port(address)
    return target.add_secure_port(address, _server_side(certificates, certified=certified))


def _server_side(folder: CertificateFolder, *, certified: bool) -> grpc.ServerCredentials:
    used = folder.latest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None if nothing changed.

        gRPC calls this before each handshake, on its own thread.
        """
        nonlocal used
        latest = folder.latest()
        if latest is used:
            return None
        used = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        changed,  # type: ignore[arg-type]  # grpc-stubs does not know that None is allowed
        require_client_authentication=certified,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.authorities)


async def start(target: grpc.aio.Server) -> None:
    """Start the server. If the start is cancelled, stop the server.

    A cancelled `server.start` would leave a server that listens and cannot be stopped.
    """
    starting = asyncio.ensure_future(target.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        await target.stop(None)
        raise


def add_service(
    target: grpc.aio.Server,
    service: ServiceDescriptor,
    servicer: object,
    max_fields: int | None = None,
) -> None:
    """Register the methods of `servicer` as handlers of the `service` methods with the same names.

    `max_fields` bounds the fields of a request, for servers that strangers call. Handlers take
    (request, context). If a handler raises a MeshError, the caller gets the error's gRPC status
    with ErrorInfo. Any other exception is logged, and the caller gets INTERNAL without its text.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        handler = getattr(servicer, method.name)
        check = functools.partial(check_caller, f"/{service.full_name}/{method.name}")
        parse = _parser(method.input_type, max_fields)
        serialize: Callable[[Any], bytes] = lambda message: message.SerializeToString()  # noqa: E731
        if method.client_streaming and method.server_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                _stream_stream(handler, parse, check), response_serializer=serialize
            )
        elif method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _unary_stream(handler, parse, check), response_serializer=serialize
            )
        elif method.client_streaming:
            raise ValueError(f"{method.full_name}: client streaming alone is not used here")
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _unary_unary(handler, parse, check), response_serializer=serialize
            )
    target.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _parser(message_type: Any, max_fields: int | None) -> Callable[[bytes], Message]:
    make = GetMessageClass(message_type)

    def parse(data: bytes) -> Message:
        if max_fields is not None:
            check_num_fields(data, message_type, max_fields)
        try:
            return make.FromString(data)
        except DecodeError as exc:
            raise InvalidRequest(f"not a valid {message_type.full_name}", field="request") from exc

    return parse


def _unary_unary(
    handler: Callable[[Any, Any], Awaitable[Message]],
    parse: Callable[[bytes], Message],
    check: Check,
) -> Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Awaitable[Message]]:
    async def call(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        try:
            check(context)
            return await handler(parse(data), context)
        except Exception as exc:  # noqa: BLE001  # the edge: each becomes a status
            await fail(context, exc)

    return call


def _unary_stream(
    handler: Callable[[Any, Any], AsyncIterator[Message]],
    parse: Callable[[bytes], Message],
    check: Check,
) -> Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], AsyncIterator[Message]]:
    async def call(
        data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Message]:
        try:
            check(context)
            async for response in handler(parse(data), context):
                yield response
        except Exception as exc:  # noqa: BLE001  # the edge: each becomes a status
            await fail(context, exc)

    return call


def _stream_stream(
    handler: Callable[[AsyncIterator[Any], Any], AsyncIterator[Message]],
    parse: Callable[[bytes], Message],
    check: Check,
) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[Any, Any]], AsyncIterator[Message]]:
    async def call(
        chunks: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Message]:
        async def requests() -> AsyncIterator[Message]:
            async for data in chunks:
                yield parse(data)

        try:
            check(context)
            async for response in handler(requests(), context):
                yield response
        except Exception as exc:  # noqa: BLE001  # the edge: each becomes a status
            await fail(context, exc)

    return call


async def fail(context: grpc.aio.ServicerContext[Any, Any], exc: Exception) -> NoReturn:
    """End the call with the status of this error."""
    if isinstance(exc, grpc.aio.AbortError):
        raise exc
    raised = exc
    if not isinstance(exc, MeshError):
        log.error("rpc.bug", exc_info=exc)
        exc = MeshError("internal error; the server's log has the cause")
    # gRPC keeps the exception that `abort` raises, and with it the traceback of `raised`. The
    # frames of that traceback would keep the request in memory.
    raised.with_traceback(None).__context__ = None
    raised.__cause__ = None
    status = to_status(exc)
    context.set_trailing_metadata(((_STATUS_DETAILS, status.SerializeToString()),))
    await context.abort(grpc.StatusCode[exc.grpc_code], exc.message)


def to_status(exc: MeshError) -> Status:
    """The error as google.rpc.Status.

    The details are ErrorInfo, BadRequest if the error names a field, and RetryInfo if the error
    says when to retry.
    """
    status = Status(code=grpc.StatusCode[exc.grpc_code].value[0], message=exc.message)
    details: list[Message] = [ErrorInfo(reason=exc.reason, domain=_DOMAIN)]
    if exc.field:
        violation = BadRequest.FieldViolation(field=exc.field, description=exc.message)
        details.append(BadRequest(field_violations=[violation]))
    if exc.retry_after_ms is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(exc.retry_after_ms)
        details.append(retry)
    for detail in details:
        packed = AnyProto()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def untrusted(exc: grpc.aio.AioRpcError) -> str:
    """Why the server's certificate was refused. Empty if the call failed for another reason."""
    details = exc.details() or ""
    if found := _UNVERIFIED.search(details):
        return f"the server's certificate is not accepted: {found[1]}"
    if _MISNAMED in details:
        return "the server's certificate is not accepted: it names another process"
    return ""


def failure_of(exc: grpc.aio.AioRpcError) -> str:
    """A text for a log line: the fault of the server's certificate, or else the call's status."""
    return untrusted(exc) or exc.code().name


def is_silence(exc: grpc.aio.AioRpcError) -> bool:
    """Whether the connection ended because the peer sent nothing.

    Then the peer is frozen, or its host or the network is lost. If only the peer's process had
    ended, its host would have closed the connection at once.
    """
    return bool(_SILENCE.search(exc.details() or ""))


def from_rpc_error(exc: grpc.aio.AioRpcError) -> MeshError:
    """The MeshError that a peer raised, or the closest one if the transport itself failed."""
    reason, field, retry_after_ms = "", None, None
    trailing: Any = exc.trailing_metadata() or ()  # pairs, although grpc-stubs says otherwise
    for key, value in trailing:
        if key != _STATUS_DETAILS or not isinstance(value, bytes):
            continue
        for detail in Status.FromString(value).details:
            info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad) and bad.field_violations:
                field = bad.field_violations[0].field
            elif detail.Unpack(retry):
                retry_after_ms = retry.retry_delay.ToMilliseconds()
    code = exc.code().name
    if not reason and (why := untrusted(exc)):
        return UntrustedPeer(why)
    kind = errors.BY_REASON.get(reason) or _ERRORS_BY_CODE.get(code, MeshError)
    return kind(
        exc.details() or code, reason=reason or None, field=field, retry_after_ms=retry_after_ms
    )
