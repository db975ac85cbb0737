"""The endpoint picker's answers to a proxy, part by part.

The picker tells a proxy in front of the mesh which gateway takes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdmesh.envoy.v3 import external_processor_pb2 as pb
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.http.exchange import BodyRoom, BodyTooLarge
from pdmesh.services.gateway.picker.answers import Pick
from pdmesh.services.gateway.picker.dialogue import PickDialogue, WrongProcessingMode
from tests.support.proxies.asking import endpoints_of

PICK = Pick(["10.0.0.1:8000", "10.0.0.2:8000"], "a-plan")
ENDPOINTS = "10.0.0.1:8000,10.0.0.2:8000"


def dialogue(room: BodyRoom | None = None) -> PickDialogue:
    return PickDialogue(lambda method, path: path == "/planned", 1000, room or BodyRoom(10_000))


def head(
    path: str = "/planned",
    mode: int | None = pb.FULL_DUPLEX_STREAMED,
    *,
    ends: bool = False,
    **headers: str,
) -> pb.ProcessingRequest:
    all_headers = {":method": "POST", ":path": path} | headers
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = ends
    for name, value in all_headers.items():
        found = message.request_headers.headers.headers.add(key=name.replace("_", "-"))
        found.raw_value = value.encode()
    if mode is not None:
        message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
        message.protocol_config.response_body_mode = pb.FULL_DUPLEX_STREAMED
    return message


def body(data: bytes, *, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


def kinds(answers: Sequence[pb.ProcessingResponse]) -> list[str | None]:
    return [a.WhichOneof("response") for a in answers]


def streamed(answers: Sequence[pb.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    found = [a.request_body.response.body_mutation.streamed_response for a in answers]
    return [(each.body, each.end_of_stream) for each in found]


def check_pick(answer: pb.ProcessingResponse, common: pb.CommonResponse) -> None:
    headers = common.header_mutation.set_headers
    assert {h.header.key: h.header.raw_value.decode() for h in headers} == {
        "x-gateway-destination-endpoint": ENDPOINTS,
        "x-pdmesh-plan": "a-plan",
    }
    assert {h.append_action for h in headers} == {pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD}
    assert common.clear_route_cache
    assert endpoints_of(answer) == ENDPOINTS


def test_in_full_duplex_nothing_is_said_before_the_body_is_whole() -> None:
    at = dialogue()
    assert list(at.hear(head())) == []
    assert list(at.hear(body(b"abc"))) == []
    assert not at.wants_pick
    assert list(at.hear(body(b"def", ends=True))) == []
    assert at.wants_pick
    assert at.body == b"abcdef"
    answers = list(at.picked(PICK))
    check_pick(answers[0], answers[0].request_headers.response)
    assert streamed(answers[1:]) == [(b"abc", False), (b"def", True)]


def test_pieces_are_no_larger_than_the_proxy_takes_and_lose_nothing() -> None:
    at = PickDialogue(lambda *_: True, 1 << 20, BodyRoom(1 << 20))
    at.hear(head())
    data = bytes(range(256)) * 1000
    at.hear(body(data, ends=True))
    pieces = streamed(list(at.picked(PICK))[1:])
    assert b"".join(piece for piece, _ in pieces) == data
    assert max(len(piece) for piece, _ in pieces) <= 62_000
    assert [ends for _, ends in pieces] == [*[False] * (len(pieces) - 1), True]


def test_trailers_end_a_body_and_come_after_it() -> None:
    at = dialogue()
    at.hear(head())
    at.hear(body(b"abc"))
    at.hear(TRAILERS)
    assert at.wants_pick
    answers = list(at.picked(PICK))
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert streamed(answers[1:2]) == [(b"abc", False)]


def test_buffered_the_head_goes_on_first_without_what_only_the_picker_may_say() -> None:
    at = dialogue()
    (first,) = at.hear(head(mode=pb.BUFFERED))
    removed = first.request_headers.response.header_mutation.remove_headers
    assert set(removed) == {"x-gateway-destination-endpoint", "x-pdmesh-plan"}
    assert list(at.hear(body(b"abc", ends=True))) == []
    (answer,) = at.picked(PICK)
    check_pick(answer, answer.request_body.response)


def test_without_a_plan_a_plan_of_the_client_is_removed() -> None:
    at = dialogue()
    at.hear(head("/other", ends=True))
    (answer,) = at.picked(Pick(["10.0.0.1:8000"]))
    mutation = answer.request_headers.response.header_mutation
    assert list(mutation.remove_headers) == ["x-pdmesh-plan"]


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED, pb.FULL_DUPLEX_STREAMED])
def test_a_request_that_is_not_planned_waits_for_no_body(mode: int) -> None:
    at = dialogue()
    at.hear(head("/other?a=b", mode))
    assert at.wants_pick
    assert at.head is not None
    assert at.head.path == "/other"
    assert kinds(list(at.picked(PICK))) == ["request_headers"]
    (answer,) = at.hear(body(b"abc", ends=True))
    mutation = answer.request_body.response.body_mutation
    if mode == pb.FULL_DUPLEX_STREAMED:
        assert streamed([answer]) == [(b"abc", True)]
    else:
        assert mutation.WhichOneof("mutation") is None
    assert kinds(list(at.hear(TRAILERS))) == ["request_trailers"]


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED_PARTIAL, pb.GRPC])
def test_a_mode_without_whole_bodies_is_refused_by_its_name(mode: int) -> None:
    with pytest.raises(WrongProcessingMode) as refused:
        dialogue().hear(head(mode=mode))
    assert pb.BodySendMode.Name(mode) in refused.value.message  # type: ignore[arg-type]
    assert refused.value.field == "processing_mode.request_body_mode"


def test_a_proxy_that_names_no_mode_gets_pieces() -> None:
    at = dialogue()
    at.hear(head(mode=None))
    at.hear(body(b"abc", ends=True))
    assert streamed(list(at.picked(PICK))[1:]) == [(b"abc", True)]


def test_a_body_over_the_bound_is_refused_when_it_is_announced_or_comes() -> None:
    with pytest.raises(BodyTooLarge):
        dialogue().hear(head(content_length="1001"))
    room = BodyRoom(10_000)
    at = dialogue(room)
    at.hear(head())
    at.hear(body(b"x" * 1000))
    with pytest.raises(BodyTooLarge):
        at.hear(body(b"x"))
    assert room.num_bytes == 1001
    at.close()
    at.close()
    assert room.num_bytes == 0


def test_all_bodies_share_one_room_which_is_free_again_once_they_went_on() -> None:
    room = BodyRoom(1500)
    first, second = dialogue(room), dialogue(room)
    for at in (first, second):
        at.hear(head())
    first.hear(body(b"x" * 900, ends=True))
    with pytest.raises(Overloaded):
        second.hear(body(b"x" * 900))
    list(first.picked(PICK))
    assert room.num_bytes == 0
    second.hear(body(b"x" * 900))
    second.close()


@pytest.mark.parametrize(
    ("messages", "field"), [([body(b"a")], "request"), ([head(), head()], "request_headers")]
)
def test_parts_out_of_their_order_are_refused(
    messages: list[pb.ProcessingRequest], field: str
) -> None:
    at = dialogue()
    *before, last = messages
    for message in before:
        at.hear(message)
    with pytest.raises(InvalidRequest) as refused:
        at.hear(last)
    assert refused.value.field == field


HINTS: Any = [
    ({}, None),
    ({"x-gateway-destination-endpoint-subset": []}, frozenset()),
    (
        {"x-gateway-destination-endpoint-subset": ["10.0.0.1:80", "10.0.0.2:80"]},
        {"10.0.0.1:80", "10.0.0.2:80"},
    ),
    ({"x-gateway-destination-endpoint-subset": "10.0.0.1:80, "}, {"10.0.0.1:80"}),
]


@pytest.mark.parametrize(("hint", "expected"), HINTS)
def test_the_proxy_s_hint_says_what_to_choose_from(hint: dict[str, Any], expected: Any) -> None:
    message = head("/other")
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    at = dialogue()
    at.hear(message)
    assert at.head is not None
    assert at.head.only == expected


def test_the_response_passes_as_it_is() -> None:
    at = dialogue()
    at.hear(head("/other", ends=True))
    list(at.picked(PICK))
    part = pb.HttpBody(body=b"data: x\n\n", end_of_stream=True)
    (answer,) = at.hear(pb.ProcessingRequest(response_body=part))
    streamed_part = answer.response_body.response.body_mutation.streamed_response
    assert (streamed_part.body, streamed_part.end_of_stream) == (b"data: x\n\n", True)
    (answer,) = at.hear(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
    assert answer.WhichOneof("response") == "response_headers"
    (answer,) = at.hear(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert answer.WhichOneof("response") == "response_trailers"


def test_a_body_that_the_proxy_keeps_takes_no_room_after_the_pick() -> None:
    room = BodyRoom(100)
    for _ in range(3):
        at = dialogue(room)
        at.hear(head(mode=pb.BUFFERED))
        at.hear(body(b"a" * 60, ends=True))
        list(at.picked(PICK))


@pytest.mark.parametrize("announced", ["9" * 5000, "1001"])
def test_a_length_of_any_number_of_digits_is_too_large(announced: str) -> None:
    with pytest.raises(BodyTooLarge):
        dialogue().hear(head(content_length=announced))


def test_a_mode_of_a_later_envoy_is_named_by_its_number() -> None:
    with pytest.raises(WrongProcessingMode, match="request_body_mode is 99"):
        dialogue().hear(head(mode=99))
