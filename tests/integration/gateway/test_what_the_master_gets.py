"""Tests what a gateway sends to the master about a prompt. The messages may have block names and
lengths, but no text (S89).
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.message import Message

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from pdmesh.v1.instance_service_pb2 import Prefill
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.fake_master import FakeMaster, leader_at, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh

BLOCK = 16  # the number of tokens in a block of a fake instance
CANARY = (
    # The text is longer than a block, because the tiny tokenizer has one token per byte.
    "Xylophone-Quartz-"
)
# All fields that a request to the master may have. Add a new field only if it reveals nothing about
# a prompt.
TOLD = {
    "gateway_id",
    "region",
    "queries",
    "queries.request_id",
    "queries.attempt",
    "queries.model",
    "queries.scenario",
    "queries.block_hashes",
    "queries.num_prompt_tokens",
    "queries.max_tokens",
    "queries.chat_id",
    "queries.excluded_instance_ids",
    "queries.traceparent",
}


class ListeningMaster(FakeMaster):
    """A master that keeps each request, and ranks the mesh's prefill and decode."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[pb.PlanRequest] = []
        self.prefills, self.decodes = ["prefill-0"], ["decode-0"]

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        self.heard.append(request)
        results = [
            pb.PlanResult(
                request_id=query.request_id,
                group_id="default",
                prefills=[pb.Candidate(instance_id=i, incarnation=1) for i in self.prefills],
                decodes=[
                    pb.Candidate(instance_id=i, incarnation=1)
                    for i in self.decodes
                    if i not in query.excluded_instance_ids
                ],
            )
            for query in request.queries
        ]
        return pb.PlanResponse(epoch=1, results=results)

    def query(self) -> pb.PlanQuery:
        return self.heard[-1].queries[-1]


def fields_of(message: Message, path: str = "") -> set[str]:
    """The paths of all fields that are set."""
    found = set()
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        found.add(name)
        if field.type == field.TYPE_MESSAGE:
            for each in value if field.is_repeated else (value,):
                found |= fields_of(each, f"{name}.")
    return found


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def spellings(tokens: array[int]) -> list[bytes]:
    """The last eight tokens, in every form in which a message might hold token ids."""
    part = tokens[-8:]
    text = ",".join(map(str, part))
    return [
        tokens_to_bytes(part),
        b"".join(map(varint, part)),
        text.encode(),
        text.replace(",", ", ").encode(),
    ]


def without_names(query: pb.PlanQuery) -> pb.PlanQuery:
    """The query without its block names and ids."""
    rest = pb.PlanQuery()
    rest.CopyFrom(query)
    for field in ("request_id", "traceparent", "block_hashes"):
        rest.ClearField(field)
    return rest


async def ask(mesh: GatewayMesh, prompt: str, **more: object) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **more}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def last_prefill(mesh: GatewayMesh) -> Prefill:
    return mesh.instances["prefill-0"].prefills[-1]


@pytest.mark.req("S89")
async def test_a_plan_query_has_block_names_and_lengths_but_no_text(
    tmp_path: Path,
) -> None:
    master = ListeningMaster()
    async with gateway_mesh(tmp_path) as mesh, serving(master) as port:
        mesh.register(leader_at(port))
        await ask(mesh, CANARY * 5, chat_id="chat-" + CANARY, user=CANARY)
        tokens = mesh.tokenizer._encode(CANARY * 5, add_special_tokens=True)
        query = master.query()
        assert query.num_prompt_tokens == len(tokens)
        assert len(query.block_hashes) == len(tokens) // BLOCK >= 4
        assert list(query.block_hashes) == list(last_prefill(mesh).block_hashes)
        assert {len(name) for name in query.block_hashes} == {16}
        assert query.chat_id
        async with httpx.AsyncClient(timeout=60) as client:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": CANARY * 5}]}
            url = f"{mesh.url}/v1/chat/completions"
            assert (await client.post(url, json={**chat, "max_tokens": 4})).status_code == 200
        assert master.query().num_prompt_tokens == len(last_prefill(mesh).prompt_token_ids) // 4
        assert len(master.heard) == 2
        for request in master.heard:
            assert fields_of(request) <= TOLD
            assert CANARY.encode() not in request.SerializeToString()
        for spelling in spellings(tokens):
            assert spelling not in master.heard[0].SerializeToString()


@pytest.mark.req("S89")
async def test_a_query_depends_only_on_the_block_names_and_the_length_of_its_prompt(
    tmp_path: Path,
) -> None:
    """Then no other field of a query can tell anything about the text."""
    master = ListeningMaster()
    async with gateway_mesh(tmp_path) as mesh, serving(master) as port:
        mesh.register(leader_at(port))
        mine = "a" * (3 * BLOCK + 5)
        queries = []
        for prompt in (mine, mine[:-1] + "b", "b" + mine[1:]):
            await ask(mesh, prompt)
            queries.append(master.query())
        same, other_end, other_begin = queries
        assert list(other_end.block_hashes) == list(same.block_hashes), (
            "no block ends within the changed text"
        )
        assert len(same.block_hashes) >= 3
        assert not set(other_begin.block_hashes) & set(same.block_hashes), (
            "each name depends on all tokens before it"
        )
        assert without_names(same) == without_names(other_end) == without_names(other_begin)


@pytest.mark.req("S80", "S89")
async def test_block_names_cannot_be_computed_without_the_secret_and_differ_by_salt(
    tmp_path: Path,
) -> None:
    """Otherwise a master could find out a text by trying likely texts."""
    names = []
    for secret, salt in (("one", ""), ("one", "s"), ("two", "")):
        master = ListeningMaster()
        async with (
            gateway_mesh(tmp_path, hash_secret=secret) as mesh,
            serving(master) as port,
        ):
            mesh.register(leader_at(port))
            await ask(mesh, CANARY * 5, chat_id="c", cache_salt=salt)
            names.append({*master.query().block_hashes})
    assert all(len(each) >= 4 for each in names)
    assert not names[0] & names[1]
    assert not names[0] & names[2]


@pytest.mark.req("S89")
async def test_the_tokens_of_a_lost_leg_reveal_no_text(tmp_path: Path) -> None:
    """The second plan also covers the tokens that the client already has. These tokens are text as
    well.
    """
    master = ListeningMaster()
    async with gateway_mesh(tmp_path, 0, 0) as mesh, serving(master) as port:
        for role, name in (
            (ROLE_PREFILL, "prefill-0"),
            (ROLE_DECODE, "decode-0"),
            (ROLE_DECODE, "decode-1"),
        ):
            await mesh.add(FakeInstance(role, name))
        master.decodes = ["decode-0", "decode-1"]
        mesh.instances["decode-0"].breaks_at = 20
        mesh.register(leader_at(port))
        await ask(mesh, f"{CANARY}<eos>say:{CANARY}<eos>say:", max_tokens=40)
        first, again = (request.queries[0] for request in master.heard)
        assert again.excluded_instance_ids == ["decode-0"]
        emitted = again.num_prompt_tokens - first.num_prompt_tokens
        assert emitted > 0
        assert again.max_tokens == 40 - emitted
        sent = last_prefill(mesh).prompt_token_ids
        tokens = array("I", sent)
        assert len(tokens) == again.num_prompt_tokens
        for request in master.heard:
            assert fields_of(request) <= TOLD
            data = request.SerializeToString()
            assert CANARY.encode() not in data
            assert not [s for s in spellings(tokens) if s in data]
