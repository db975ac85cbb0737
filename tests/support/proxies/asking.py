"""Messages between a proxy and an endpoint picker, which chooses a gateway for the proxy."""

from __future__ import annotations

from typing import Final

from pdmesh.envoy.v3 import external_processor_pb2 as pb

ENDPOINT: Final = "x-gateway-destination-endpoint"
GET_MODELS: Final = pb.ProcessingRequest(
    request_headers=pb.HttpHeaders(
        headers=pb.HeaderMap(
            headers=[
                pb.HeaderValue(key=":method", raw_value=b"GET"),
                pb.HeaderValue(key=":path", raw_value=b"/v1/models"),
            ]
        ),
        end_of_stream=True,
    )
)


def endpoints_of(answer: pb.ProcessingResponse) -> str:
    """The endpoints in the metadata of the picker's answer."""
    fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert list(fields) == [ENDPOINT]
    return fields[ENDPOINT].string_value
