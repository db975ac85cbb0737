"""Messages with very many fields are refused before they are parsed (F30)."""

from __future__ import annotations

import contextlib

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.net.grpc.proto_bounds import check_num_fields
from pdmesh.v1 import inference_service_pb2 as pb
from tests.support.cost import cost_ratio

MOST = 32_768


def framed(tag: int, data: bytes) -> bytes:
    size, length = bytearray(), len(data)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([tag, *size, length]) + data


def check_largest_honest() -> None:
    """Check a conversation that has as many fields as allowed."""
    message = pb.ChatMessage(role="user", content="x" * 100)
    request = pb.ChatRequest(messages=[message] * (MOST // 3 - 1))
    check_num_fields(request.SerializeToString(), request.DESCRIPTOR, MOST)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("data", "message", "field"),
    [
        (b"\x12\x00" * (4 << 20), pb.ChatRequest, "messages"),
        (framed(0x0A, b"\x12\x00" * (4 << 20)), pb.ChatStreamRequest, "request.messages"),
        (b"\xfa\x01\x00" * (2 << 20), pb.ChatRequest, "unknown field 31"),
    ],
)
def test_a_field_with_millions_of_objects_is_refused_by_its_name(
    data: bytes, message: type[pb.ChatRequest], field: str
) -> None:
    def refuse() -> None:
        with pytest.raises(InvalidRequest) as caught:
            check_num_fields(data, message.DESCRIPTOR, MOST)
        assert caught.value.field == field

    assert cost_ratio(refuse, check_largest_honest) <= 10


@pytest.mark.fault("F30")
def test_long_text_and_many_token_ids_pass() -> None:
    text = pb.GenerateRequest(text="x" * (8 << 20))
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1_000_000)))
    message = pb.ChatMessage(role="user", content="x" * 100)
    chat = pb.ChatStreamRequest(request=pb.ChatRequest(messages=[message] * 2048))
    for request in (text, ids, chat):
        check_num_fields(request.SerializeToString(), request.DESCRIPTOR, MOST)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100_000, b"\x12" + b"\xff" * 100_000, b"\x12\xff\x7f" * 30_000, b"\x0b" * 100_000],
)
def test_bytes_that_are_not_a_message_are_left_to_the_parser(data: bytes) -> None:
    def check() -> None:
        with contextlib.suppress(InvalidRequest):  # the bytes may look like too many fields
            check_num_fields(data, pb.ChatRequest.DESCRIPTOR, MOST)

    assert cost_ratio(check, check_largest_honest) <= 10
