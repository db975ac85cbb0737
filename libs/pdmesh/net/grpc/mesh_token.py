"""The mesh token: a secret that a mesh's own processes send with every gRPC call.

Without mutual TLS, only this token keeps strangers out. A server refuses a call without the token
before it reads a message of the call. The token is only for inner ports. The public ports of
gateways neither require it nor accept it as an API key.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Self

import grpc

from pdmesh.errors import WrongMeshToken

METADATA_KEY: Final = "pdmesh-mesh-token"
_REFUSAL: Final = (
    "this port is for the mesh's own processes: the mesh token is missing or wrong "
    "(PDMESH_MESH_TOKEN or PDMESH_MESH_TOKEN_FILE)"
)

# grpc-stubs has no types for a call's details and for handlers that fit here.
Details = Any
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]


class TokenChannel(grpc.aio.Channel):
    """A channel that adds the token to every call."""

    def __init__(self, inner: grpc.aio.Channel, token: str) -> None:
        self._inner = inner
        self._metadata = ((METADATA_KEY, token),)

    # The types are Any because grpc-stubs has no asyncio types for the serializers that a stub
    # passes and for the callable that it gets.
    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._inner.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._inner.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._inner.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._inner.stream_stream(*args, **options))

    def _with_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def invoke(*args: Any, metadata: Iterable[Any] | None = None, **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return invoke

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inner.close(None)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in grpc-stubs
    """Refuses each call without the token before its first message is read."""

    def __init__(self, token: str, refuse: Callable[[Context, Exception], Awaitable[None]]) -> None:
        self._token = token.encode()
        self._refuse = refuse

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        if self._is_shown(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        # gRPC would read the request before it calls a unary handler. A handler of a stream decides
        # when to read, and this handler never reads.
        return grpc.stream_stream_rpc_method_handler(self._answer)

    def _is_shown(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        shown = [v for key, v in metadata or () if key == METADATA_KEY]
        found = shown[0] if len(shown) == 1 else ""
        return hmac.compare_digest(
            found if isinstance(found, bytes) else found.encode(), self._token
        )

    async def _answer(self, _: object, context: Context) -> None:
        await self._refuse(context, WrongMeshToken(_REFUSAL))
