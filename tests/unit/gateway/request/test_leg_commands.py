"""The data about a request in plan queries and in commands to instances."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY, MAX_PRIORITY
from pdmesh.core.request.events import AskPlan, Candidate, SendPrefill, SendStart, TicketHeld
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs.convert import priority_from_proto, shaping_from_proto
from pdmesh.services.gateway.request.leg_commands import (
    ChoiceIdentity,
    LegCommands,
    shaping_to_proto,
)
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec
from pdmesh.services.gateway.routing.adapter_names import AdaptedModel
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import InstanceRecord, Ticket
from pdmesh.v1.instance_service_pb2 import KV_TRANSFER_WHOLE
from tests.fakes.tokenizers import SIM_TOKENIZER


def asked_chat_id(tenant: str, chat_id: str, secret: bytes = b"s") -> str:
    tokens = array("I", [1, 2, 3])
    spec = CallSpec(
        "chat",
        "m",
        (tokens,),
        SamplingSpec(),
        SIM_TOKENIZER,
        chat_id=chat_id,
        tenant=Tenant(tenant),
    )
    commands = LegCommands(spec, Prompt(tokens, secret, tenant, ""), ChoiceIdentity("r", 0), ())
    return commands.plan_query(AskPlan(1, 0, ()), None, (), 1).chat_id


def test_equal_chat_ids_of_two_tenants_mean_two_conversations() -> None:
    mine = asked_chat_id("acme", "c")
    assert mine == asked_chat_id("acme", "c")
    assert len({mine, asked_chat_id("beta", "c"), asked_chat_id("acme", "d")}) == 3
    assert mine != asked_chat_id("acme", "c", b"t"), "it cannot be made without the secret"
    assert asked_chat_id("acmec", "") == asked_chat_id("acme", "") == ""
    assert asked_chat_id("acme", "c" * 256) != "c" * 256


def test_logit_shaping_reaches_the_instance_unchanged() -> None:
    budget = ThinkingBudget(7, ThinkingMarks((1, 2), (3,)))
    asked = LogitShaping(
        1.0,
        -0.5,
        1.5,
        50,
        0.25,
        4,
        ((5, 3.0),),
        ((6, 7), (8,)),
        (9, 10),
        thinking_token_budget=budget,
    )
    message = shaping_to_proto(asked)
    assert message is not None
    assert shaping_from_proto(message) == asked
    message.ClearField("thinking_token_budget")
    assert shaping_from_proto(message) == replace(asked, thinking_token_budget=None)
    assert shaping_to_proto(UNSHAPED) is None


def test_a_request_for_an_adapter_names_the_model_and_the_content_everywhere() -> None:
    """Block names, salt, plan and legs depend on the adapter's content. Otherwise KV of other
    content would match.
    """
    tokens = array("I", range(130))
    record = InstanceRecord(instance_id="p", incarnation=1, model_fingerprint="f", block_size=64)
    sent = {}
    for digest in ("", "d1", "d2"):
        found = AdaptedModel(Adapter("sql", digest, "/sql"), "base") if digest else None
        name = "sql" if digest else "base"
        spec = CallSpec("chat", name, (tokens,), SamplingSpec(), SIM_TOKENIZER, adapter=found)
        prompt = Prompt(tokens, b"s", "acme", "", digest)
        commands = LegCommands(spec, prompt, ChoiceIdentity("r", 0), ())
        query = commands.plan_query(AskPlan(1, 0, ()), record, (), 1)
        send = SendPrefill(1, Candidate("p", 1), 1, 0, 5)
        prefill = commands.prefill(send, record, (), KV_TRANSFER_WHOLE).prefill
        assert query.model == prefill.model == "base"
        assert query.adapter_digest == prefill.adapter.digest == digest
        assert prefill.HasField("adapter") == bool(digest)
        assert list(query.block_hashes) == list(prefill.block_hashes)
        sent[digest] = (bytes(query.block_hashes[0]), prefill.cache_salt)
    assert len({first for first, _ in sent.values()}) == 3
    assert len({salt for _, salt in sent.values()}) == 3


@pytest.mark.req("S83")
@pytest.mark.parametrize("priority", [0, 1, 7, 2**40])
def test_both_roles_learn_how_urgent_the_tenant_is(priority: int) -> None:
    tokens = array("I", range(130))
    record = InstanceRecord(instance_id="p", incarnation=1, model_fingerprint="f", block_size=64)
    tenant = Tenant("acme", priority=priority)
    spec = CallSpec("chat", "m", (tokens,), SamplingSpec(), SIM_TOKENIZER, tenant=tenant)
    commands = LegCommands(spec, Prompt(tokens, b"s", "acme", ""), ChoiceIdentity("r", 0), ())
    ticket = TicketHeld("t", 1.0, Ticket())
    send = SendPrefill(1, Candidate("p", 1), 1, 0, 5)
    prefill = commands.prefill(send, record, (), KV_TRANSFER_WHOLE).prefill
    start = commands.start(SendStart(2, Candidate("d", 1), 1, ticket, 1, 4), record, [5], 0.0).start
    for message in (prefill, start):
        assert priority_from_proto(message) == min(priority, MAX_PRIORITY)
        message.ClearField("priority")
        assert priority_from_proto(message) == DEFAULT_PRIORITY
        message.priority = MAX_PRIORITY + 1
        with pytest.raises(InvalidRequest) as refused:
            priority_from_proto(message)
        assert refused.value.field == "priority"
