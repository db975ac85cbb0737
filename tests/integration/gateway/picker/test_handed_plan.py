"""Tests requests that bring a plan in a header. A plan names the instances that may serve the
request. The gateway must use the plan only if an endpoint picker of the mesh made it, and must
otherwise ask the master.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.services.gateway.openai.calls import completion_spec
from pdmesh.services.gateway.openai.schema import CompletionRequest
from pdmesh.services.gateway.picker.placing import Placing
from pdmesh.services.gateway.request.frontend import handed_for
from pdmesh.services.gateway.routing.handed_plans import HandedPlans
from pdmesh.v1.common_pb2 import ROLE_PREFILL
from pdmesh.v1.scheduler_service_pb2 import Candidate, HandedPlan, PlanResult
from tests.fakes.fake_instance import FakeInstance
from tests.support.proxies.picked_site import SECRET, PickedSite, picked_site
from tests.support.waiting import until

REQUEST_ID = "req-0fba"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[PickedSite]:
    async with picked_site(tmp_path) as site:
        yield site


async def plan_of(site: PickedSite, prompt: str, prefill: str = "prefill-1") -> HandedPlan:
    """A plan for this prompt, in the form in which a picker hands it to the proxy. The plan names a
    prefill and a decode that the gateway would not choose, so the test sees whether the gateway
    used it.
    """
    frontend = site.gateways[0].frontend
    request = CompletionRequest(model="tiny", prompt=prompt, max_tokens=4)
    plan = handed_for(await frontend.prepare(await completion_spec(request, frontend, ANYONE)))
    plan.result.CopyFrom(
        PlanResult(
            request_id=REQUEST_ID,
            prefills=[Candidate(instance_id=prefill, incarnation=1)],
            decodes=[Candidate(instance_id="decode-1", incarnation=1)],
        )
    )
    return plan


async def ask(site: PickedSite, header: str, prompt: str = "abc", **more: Any) -> httpx.Response:
    """Send a request directly to a gateway, as the proxy would."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **more}
    url = f"{site.mesh.url}/v1/completions"
    return await site.client.post(url, json=body, headers={"x-pdmesh-plan": header})


async def test_a_picker_s_plan_is_used_under_its_id(site: PickedSite) -> None:
    answer = await ask(site, HandedPlans(SECRET.encode()).issue(await plan_of(site, "abc")))
    assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 4)
    assert answer.headers["x-request-id"] == REQUEST_ID
    assert [p.request_id for p in site.mesh.instances["prefill-1"].prefills] == [REQUEST_ID]
    assert [s.request_id for s in site.mesh.instances["decode-1"].starts] == [REQUEST_ID]
    assert not site.master.queries


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 0, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
@pytest.mark.parametrize("model_default", [None, 7])
async def test_a_picker_plans_for_the_length_that_its_gateway_allows(
    site: PickedSite, path: str, body: dict[str, Any], model_default: int | None
) -> None:
    frontend = site.gateways[0].frontend
    model = await frontend.served_model("tiny", ANYONE, "")
    model.tokenizer.defaults = replace(model.tokenizer.defaults, max_tokens=model_default)
    content = json.dumps({"model": "tiny", **body}).encode()
    placed = await Placing(frontend, is_strict=False).place(path, content, ANYONE)
    assert placed.plan is not None
    assert len(site.master.queries) == 1
    headers = {"x-pdmesh-plan": HandedPlans(SECRET.encode()).issue(placed.plan)}
    answer = await site.client.post(f"{site.mesh.url}{path}", content=content, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == placed.plan.result.request_id
    assert len(site.master.queries) == 1


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_an_agent_s_billing_line_does_not_change_the_key_of_its_chat(
    site: PickedSite, path: str, is_list: bool
) -> None:
    """Coding agents send a different line with each request."""

    async def key(line: str, told: str) -> bytes:
        texts = [line, told] if is_list else [f"{line}\n{told}"]
        parts = [{"type": "text", "text": text} for text in texts]
        system: Any = parts if is_list else texts[0]
        messages: list[Any] = [{"role": "user", "content": "abc"}]
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": messages}
        if path == "/v1/messages":
            body["system"] = system
        else:
            messages.insert(0, {"role": "system", "content": system})
        placing = Placing(site.gateways[0].frontend, is_strict=False)
        return (await placing.place(path, json.dumps(body).encode(), ANYONE)).key

    one = await key("x-anthropic-billing-header: 1;", "Be kind.")
    assert await key("x-anthropic-billing-header: 2;", "Be kind.") == one
    assert await key("x-anthropic-billing-header: 1;", "Be brief.") != one


async def test_a_used_plan_is_not_used_again(site: PickedSite) -> None:
    header = HandedPlans(SECRET.encode()).issue(await plan_of(site, "abc"))
    first, second = await ask(site, header), await ask(site, header)
    assert first.status_code == second.status_code == 200
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len(site.master.queries) == 1


@pytest.mark.parametrize("what", ["secret", "prompt", "scenario", "nonsense"])
async def test_a_plan_that_is_not_for_this_request_is_ignored(site: PickedSite, what: str) -> None:
    secret = b"another" if what == "secret" else SECRET.encode()
    plan = await plan_of(site, "abcd" if what == "prompt" else "abc")
    header = "nonsense" if what == "nonsense" else HandedPlans(secret).issue(plan)
    if what == "scenario":
        plan.scenario = "another"
        header = HandedPlans(secret).issue(plan)
    answer = await ask(site, header)
    assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 4)
    assert len(site.master.queries) == 1


async def test_when_its_instances_are_gone_the_master_is_asked(site: PickedSite) -> None:
    plan = await plan_of(site, "abc")
    await site.mesh.add(FakeInstance(ROLE_PREFILL, "prefill-1", incarnation=2))
    answer = await ask(site, HandedPlans(SECRET.encode()).issue(plan))
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == REQUEST_ID
    assert [q.request_id for q in site.master.queries] == [REQUEST_ID]


async def test_a_request_that_its_planned_instance_loses_is_planned_anew(site: PickedSite) -> None:
    plan = await plan_of(site, "abc")
    site.mesh.instances["decode-1"].breaks_at = 3
    answer = await ask(site, HandedPlans(SECRET.encode()).issue(plan))
    assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 4)
    (query,) = site.master.queries
    assert query.request_id == REQUEST_ID
    assert list(query.excluded_instance_ids) == ["decode-1"]


async def test_of_several_choices_the_first_has_the_plan(site: PickedSite) -> None:
    plan = await plan_of(site, "abc")
    answer = await ask(site, HandedPlans(SECRET.encode()).issue(plan), n=3)
    assert len(answer.json()["choices"]) == 3
    asked = sorted(q.request_id for q in site.master.queries)
    assert asked == [f"{REQUEST_ID}-1", f"{REQUEST_ID}-2"]


async def test_a_gateway_without_a_picker_takes_no_plans(tmp_path: Path) -> None:
    async with picked_site(tmp_path) as site:
        header = HandedPlans(SECRET.encode()).issue(await plan_of(site, "abc"))
        site.gateways[0].frontend.shared.handed_plans = None
        assert (await ask(site, header)).headers["x-request-id"] != REQUEST_ID
        await until(lambda: len(site.master.queries) == 1)
