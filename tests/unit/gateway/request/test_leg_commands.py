"""What a request tells the master about itself."""

from __future__ import annotations

from array import array

from pdmesh.core.request.events import AskPlan
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.services.gateway.request.leg_commands import ChoiceIdentity, LegCommands
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec
from pdmesh.services.gateway.text.prompt import Prompt
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


def test_conversations_of_two_tenants_are_two_whatever_they_call_them() -> None:
    mine = asked_chat_id("acme", "c")
    assert mine == asked_chat_id("acme", "c")
    assert len({mine, asked_chat_id("beta", "c"), asked_chat_id("acme", "d")}) == 3
    assert mine != asked_chat_id("acme", "c", b"t"), "nobody else can make it"
    assert asked_chat_id("acmec", "") == asked_chat_id("acme", "") == ""
    assert asked_chat_id("acme", "c" * 256) != "c" * 256
