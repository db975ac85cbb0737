"""The messages from the endpoint picker to the proxy, as the Endpoint Picker Protocol defines them.

https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/
004-endpoint-picker-protocol, version 1.0.0. An endpoint is a gateway. A plan names the instances
for a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.envoy.v3 import external_processor_pb2 as pb
from pdmesh.errors import MeshError
from pdmesh.services.gateway.http.errors import ErrorFormat
from pdmesh.services.gateway.http.exchange import error_headers
from pdmesh.services.gateway.routing.handed_plans import PLAN_HEADER

ENDPOINT: Final = "x-gateway-destination-endpoint"
_NAMESPACE: Final = "envoy.lb"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
# Headers that only the picker may send to gateways and proxies.
_OWN_HEADERS: Final = (ENDPOINT, PLAN_HEADER)
_OVERWRITE: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_PIECE_BYTES: Final = 62_000  # the most in one message, as Envoy's HTTP/2 frames have 64 KiB


@dataclass(frozen=True, slots=True)
class Pick:
    """The gateways for a request. `addresses` begins with the best.

    `plan` is the value of the plan's header, or empty if there is no plan.
    """

    addresses: Sequence[str]
    plan: str = ""

    @property
    def endpoints(self) -> str:
        return ",".join(self.addresses)


def allowed_addresses(metadata: pb.Metadata) -> Collection[str] | None:
    """The endpoints that the proxy lets the picker choose from. None means the whole pool."""
    hint = metadata.filter_metadata.get(_SUBSET_NAMESPACE)
    if hint is None or _SUBSET not in hint.fields:
        return None
    value = hint.fields[_SUBSET]
    if value.WhichOneof("kind") == "string_value":  # as some proxies send it
        return frozenset(part.strip() for part in value.string_value.split(",") if part.strip())
    return frozenset(each.string_value for each in value.list_value.values)


def passed_headers() -> pb.ProcessingResponse:
    """Let the proxy forward the head, without headers that only the picker may set."""
    response = pb.ProcessingResponse()
    response.request_headers.response.header_mutation.remove_headers.extend(_OWN_HEADERS)
    return response


def picked_headers(pick: Pick) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    _set_pick(response, response.request_headers.response, pick)
    return response


def picked_body(pick: Pick) -> pb.ProcessingResponse:
    """Like `picked_headers`, but in the answer to the body, as the head is already answered."""
    response = pb.ProcessingResponse()
    _set_pick(response, response.request_body.response, pick)
    return response


def _set_pick(response: pb.ProcessingResponse, common: pb.CommonResponse, pick: Pick) -> None:
    _set_header(common.header_mutation, ENDPOINT, pick.endpoints.encode())
    if pick.plan:
        _set_header(common.header_mutation, PLAN_HEADER, pick.plan.encode())
    else:
        common.header_mutation.remove_headers.append(PLAN_HEADER)
    common.clear_route_cache = True  # the proxy's routes may depend on the endpoint
    response.dynamic_metadata.get_or_create_struct(_NAMESPACE)[ENDPOINT] = pick.endpoints


def _set_header(mutation: pb.HeaderMutation, name: str, value: bytes) -> None:
    header = pb.HeaderValue(key=name, raw_value=value)
    mutation.set_headers.append(pb.HeaderValueOption(header=header, append_action=_OVERWRITE))


def streamed_request(chunks: Iterable[bytes], *, is_last: bool) -> Iterable[pb.ProcessingResponse]:
    """Give the proxy the body unchanged. With `is_last`, nothing follows, not even trailers."""
    pieces = [piece for chunk in chunks for piece in _pieces(chunk)] or [b""]
    for number, piece in enumerate(pieces, 1):
        response = pb.ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, is_last and number == len(pieces)
        yield response


def _pieces(chunk: bytes) -> Iterable[bytes]:
    return (chunk[at : at + _PIECE_BYTES] for at in range(0, len(chunk), _PIECE_BYTES))


def unchanged_request_body() -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    response.request_body.response.SetInParent()
    return response


def unchanged_response(message: pb.ProcessingRequest, *, is_duplex: bool) -> pb.ProcessingResponse:
    """Let the proxy forward a part of the gateway's response unchanged."""
    response = pb.ProcessingResponse()
    part = message.WhichOneof("request")
    if part == "response_headers":
        response.response_headers.response.SetInParent()
    elif part == "response_trailers":
        response.response_trailers.SetInParent()
    elif is_duplex:
        streamed = response.response_body.response.body_mutation.streamed_response
        streamed.body = message.response_body.body
        streamed.end_of_stream = message.response_body.end_of_stream
    else:
        response.response_body.response.SetInParent()
    return response


def passed_trailers() -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    response.request_trailers.SetInParent()
    return response


def refusal(error: MeshError, form: ErrorFormat, request_id: str) -> pb.ProcessingResponse:
    """Let the proxy send the client the same error as a gateway would."""
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = error.http_status
    immediate.body = form.body(error, request_id)
    immediate.details = f"pdmesh_{error.reason.lower()}"
    _set_header(immediate.headers, "content-type", b"application/json")
    for name in form.request_id_headers:
        _set_header(immediate.headers, name.decode(), request_id.encode())
    for name, value in error_headers(error):
        _set_header(immediate.headers, name.decode(), value)
    return response
