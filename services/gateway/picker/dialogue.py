"""Decides how the picker answers the proxy about one HTTP request, part by part.

The picker chooses an endpoint, which is a gateway, for the request. A plan names the instances that
the request may go to, and is made from the body. The proxy sends the request's head, its body if
the proxy is configured to, and later the response. If the request can be planned, the picker reads
the body first. Any other request gets an endpoint at once.

In the mode FULL_DUPLEX_STREAMED, the proxy sends the body in pieces, and forwards only the pieces
that the picker returns. In the mode BUFFERED, the proxy keeps the body, and waits for an answer to
the head before it sends a copy of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.envoy.v3 import external_processor_pb2 as pb
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.services.gateway.http.exchange import BodyRoom, BodyTooLarge, authorization_of
from pdmesh.services.gateway.picker.answers import (
    Pick,
    allowed_addresses,
    passed_headers,
    passed_trailers,
    picked_body,
    picked_headers,
    streamed_request,
    unchanged_request_body,
    unchanged_response,
)

Answers = Iterable[pb.ProcessingResponse]
_RESPONSE_PARTS: Final = frozenset({"response_headers", "response_body", "response_trailers"})
_MAX_DIGITS: Final = 18  # of a content-length. A longer number is over every bound.
_WHOLE: Final = frozenset({pb.BUFFERED, pb.FULL_DUPLEX_STREAMED})


class WrongProcessingMode(MeshError):
    """The proxy does not send the body in a mode that the picker supports."""

    default_reason = "WRONG_PROCESSING_MODE"


@dataclass(frozen=True, slots=True)
class Head:
    """`authorization` is in the form for AccessControl.

    `only` has the addresses to choose from. None means all addresses.
    """

    method: str
    path: str
    authorization: str
    only: Collection[str] | None


class PickDialogue:
    """`is_planned(method, path)` says whether a request gets a plan from its body.

    `wants_pick` becomes true when the body is complete. If the request is not planned or has no
    body, `wants_pick` becomes true at the head. The caller must then call `picked` before the next
    `hear`.
    """

    def __init__(
        self, is_planned: Callable[[str, str], bool], max_body_bytes: int, room: BodyRoom
    ) -> None:
        self._is_planned = is_planned
        self._max_body_bytes, self._room = max_body_bytes, room
        self._request_mode = self._response_mode = pb.FULL_DUPLEX_STREAMED
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._is_waiting_for_body = False
        self._has_trailers = False
        self._is_head_answered = False
        self.head: Head | None = None
        self.is_planned = False
        self.wants_pick = False
        self.has_picked = False

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    def close(self) -> None:
        """Drop the body, and give its bytes back to `room`. Idempotent."""
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0
        self._chunks.clear()

    def hear(self, message: pb.ProcessingRequest) -> Answers:
        """The answers to send before the next message is read.

        Raises MeshError to refuse the request.
        """
        part = message.WhichOneof("request")
        if part in _RESPONSE_PARTS:
            is_duplex = self._response_mode == pb.FULL_DUPLEX_STREAMED
            return [unchanged_response(message, is_duplex=is_duplex)]
        if part == "request_headers":
            return self._hear_head(message)
        if self.head is None:
            raise InvalidRequest("the first message must be request_headers", field="request")
        if part == "request_body":
            return self._hear_body(message.request_body)
        if part == "request_trailers":
            return self._hear_trailers()
        return ()

    def picked(self, pick: Pick) -> Answers:
        self.wants_pick, self.has_picked = False, True
        if self._is_head_answered:
            self.close()  # the proxy has the body itself
            return [picked_body(pick)]
        self._is_head_answered = True
        if not self._is_waiting_for_body:
            return [picked_headers(pick)]
        self._is_waiting_for_body = False
        return self._go_on(pick)

    def _go_on(self, pick: Pick) -> Answers:
        """Yield the answers one by one, so that the body is not in memory twice."""
        yield picked_headers(pick)
        yield from streamed_request(self._chunks, is_last=not self._has_trailers)
        if self._has_trailers:
            yield passed_trailers()
        self.close()

    def _hear_head(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        if self.head is not None:
            raise InvalidRequest("a stream is for one request", field="request_headers")
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        headers = _headers(message.request_headers.headers)
        self.head = Head(
            headers.get(":method", ""),
            headers.get(":path", "").partition("?")[0],
            authorization_of(headers.get("authorization", ""), headers.get("x-api-key", "")),
            allowed_addresses(message.metadata_context),
        )
        self.is_planned = self._is_planned(self.head.method, self.head.path)
        if not self.is_planned or message.request_headers.end_of_stream:
            self.wants_pick = True
            return ()
        return self._await_body(headers.get("content-length", ""))

    def _await_body(self, announced: str) -> Sequence[pb.ProcessingResponse]:
        if self._request_mode not in _WHOLE:
            known = self._request_mode in pb.BodySendMode.values()
            mode = pb.BodySendMode.Name(self._request_mode) if known else self._request_mode
            field = "processing_mode.request_body_mode"
            message = f"{field} is {mode}; it must be FULL_DUPLEX_STREAMED or BUFFERED"
            raise WrongProcessingMode(message, field=field)
        is_huge = len(announced) > _MAX_DIGITS
        if announced.isdecimal() and (is_huge or int(announced) > self._max_body_bytes):
            raise self._too_large()
        if self._request_mode == pb.BUFFERED:
            self._is_head_answered = True
            return [passed_headers()]
        self._is_waiting_for_body = True
        return ()

    def _hear_body(self, body: pb.HttpBody) -> Sequence[pb.ProcessingResponse]:
        is_duplex = self._request_mode == pb.FULL_DUPLEX_STREAMED
        if self.has_picked:
            if is_duplex:
                return list(streamed_request([body.body], is_last=body.end_of_stream))
            return [unchanged_request_body()]
        self._keep(body.body)
        self.wants_pick = body.end_of_stream or not is_duplex
        return ()

    def _keep(self, chunk: bytes) -> None:
        """Raises BodyTooLarge or Overloaded."""
        self._room.take(len(chunk))
        self._num_bytes += len(chunk)
        self._chunks.append(chunk)
        if self._num_bytes > self._max_body_bytes:
            raise self._too_large()

    def _hear_trailers(self) -> Sequence[pb.ProcessingResponse]:
        if self.has_picked:
            return [passed_trailers()]
        self._has_trailers = self.wants_pick = True
        return ()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is over {self._max_body_bytes} bytes")


def _headers(headers: pb.HeaderMap) -> dict[str, str]:
    """The headers by name. Of several headers with one name, the first is used.

    The gateway does the same.
    """
    found: dict[str, str] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") or header.value
        found.setdefault(header.key.lower(), value)
    return found
