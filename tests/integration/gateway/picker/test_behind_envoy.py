"""Tests a mesh behind an existing proxy, here Envoy. The proxy asks the endpoint picker of a
gateway which gateway takes a request. The picker also plans which instances serve the request.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.gateway.picker.modes import MODES, failing_open, only
from tests.support.proxies.picked_site import PickedSite, picked_site
from tests.support.waiting import until

SHARED = "These words are the beginning of all prompts of one kind, and have many tokens. "
OTHER = "Another kind begins in another way, and its cache is in another place than theirs. "
REGIONS = ("eu", "us")


def in_regions(site: PickedSite) -> None:
    """Put the n-th gateway, prefill and decode into the n-th region."""
    for number, region in enumerate(REGIONS):
        site.record(number, region=region)
        for role in ("prefill", "decode"):
            record = site.mesh.instances[f"{role}-{number}"].record()
            record.region = region
            site.mesh.register(record)


@pytest.mark.parametrize("change", MODES)
async def test_a_request_is_answered_by_its_plan_which_is_asked_for_once(
    tmp_path: Path, change: Any
) -> None:
    async with picked_site(tmp_path, change) as site:
        answer = await site.ask("abc", max_tokens=8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 8)
        (query,) = site.master.queries
        assert answer.headers["x-request-id"] == query.request_id
        assert [p.request_id for p in site.prefills()] == [query.request_id]


async def test_requests_with_a_shared_prefix_go_where_its_cache_is(tmp_path: Path) -> None:
    """A request must go to the prefill that has its prefix in the cache, through the gateway of the
    same region.
    """
    async with picked_site(tmp_path) as site:
        in_regions(site)
        for number in range(8):
            kind = (SHARED, OTHER)[number % 2]
            answer = await site.ask(f"{kind}{number}")
            assert answer.status_code == 200, answer.text
        await until(lambda: sum(site.num_served()) == 8)
        assert sorted(site.num_served()) == [4, 4]
        for number, served in enumerate(site.served):
            prefill = site.mesh.instances[f"prefill-{number}"]
            here = {event.request_id for event in served.finished}
            assert {p.request_id for p in prefill.prefills} == here


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_all_turns_of_a_chat_go_to_one_gateway_which_keeps_its_tokens(
    tmp_path: Path, path: str
) -> None:
    async with picked_site(tmp_path) as site:
        homes = set()
        for chat in range(4):
            turns: list[dict[str, str]] = []
            before = site.num_served()
            for turn in range(3):
                turns.append({"role": "user", "content": f"Chat {chat}, turn {turn}. {SHARED}"})
                name = "input" if path == "/v1/responses" else "messages"
                limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                body = {"model": "tiny", name: turns, limit: 16}
                answer = await site.client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                turns.append({"role": "assistant", "content": "So it is."})
            await until(lambda due=3 * chat + 3: sum(site.num_served()) == due)
            grown = [after - b for after, b in zip(site.num_served(), before, strict=True)]
            assert sorted(grown) == [0, 3]
            homes.add(grown.index(3))
        assert len(site.master.queries) == 12  # the pickers asked once for each request


async def test_each_token_of_a_stream_passes_through_at_once(tmp_path: Path) -> None:
    """In this mode, the proxy sends the response through the picker."""
    async with picked_site(tmp_path, MODES[2]) as site:
        decodes = [i for n, i in site.mesh.instances.items() if n.startswith("decode")]
        for decode in decodes:
            decode.step_s = 1e6
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "stream": True}
        text = ""
        async with site.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for number in range(8):
                if number:
                    await until(lambda: any(d.legs for d in decodes))
                    next(d for d in decodes if d.legs).step()
                while len(text) < number + 1:
                    line = await asyncio.wait_for(anext(lines), 60)
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert text == site.mesh.expected_text("abc", 8)


async def test_a_request_counts_at_its_gateway_until_its_answer_ends(tmp_path: Path) -> None:
    """A picker counts a request at its gateway until the answer ends. So chats that begin at the
    same time are spread over both gateways.
    """
    async with picked_site(tmp_path) as site:
        for instance in site.mesh.instances.values():
            instance.is_holding = True
        asked = [asyncio.create_task(site.ask(f"{SHARED}{n}")) for n in range(8)]
        await until(lambda: len(site.prefills()) == 8)
        assert sum(g.picker.servicer.num_streams for g in site.gateways if g.picker) == 8
        assert all(gateway.frontend.num_calls >= 2 for gateway in site.gateways)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(
            lambda: sum(g.picker.servicer.num_streams for g in site.gateways if g.picker) == 0
        )


async def test_when_an_endpoint_is_killed_the_next_one_takes_its_requests(tmp_path: Path) -> None:
    """The next endpoint takes the requests at once, although the record of the killed one still
    exists. It uses the plan that the picker got for the killed endpoint.
    """
    async with picked_site(tmp_path) as site:
        in_regions(site)
        assert (await site.ask(SHARED)).status_code == 200
        await until(lambda: sum(site.num_served()) == 1)
        home = site.num_served().index(1)
        await site.gateways[home].http.stop()
        for number in range(4):
            answer = await site.ask(f"{SHARED}{number}")
            assert answer.status_code == 200, answer.text
        await until(lambda: site.num_served()[1 - home] == 4)
        assert len(site.master.queries) == 5
        assert await site.envoy.counter("upstream_rq_retry_success") == 4
        site.mesh.store.remove(f"gateway-{home}", is_lease_end=True)
        assert (await site.ask(SHARED)).status_code == 200
        # The picker did not name the killed endpoint again, so Envoy made no further retry.
        assert await site.envoy.counter("upstream_rq_retry_success") == 4


@pytest.mark.parametrize("endpoint", [0, 1])
async def test_only_endpoints_that_the_proxy_allows_are_named(
    tmp_path: Path, endpoint: int
) -> None:
    async with picked_site(tmp_path, allowed=lambda addresses: only([addresses[endpoint]])) as site:
        for number in range(4):
            assert (await site.ask(f"abc {number}")).status_code == 200
        await until(lambda: site.num_served()[endpoint] == 4)
        site.record(endpoint, is_draining=True)
        refused = await site.ask("abc")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_endpoint"
        assert "among the endpoints that the proxy allows" in refused.json()["error"]["message"]


async def test_what_is_not_planned_goes_to_a_gateway_too(tmp_path: Path) -> None:
    async with picked_site(tmp_path) as site:
        models = await site.client.get("/v1/models")
        assert [m["id"] for m in models.json()["data"]] == ["tiny"]
        counted = await site.client.post("/tokenize", json={"model": "tiny", "prompt": "abc"})
        assert counted.json()["count"] == 3
        gone = await site.client.get("/nowhere")
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "not_found"
        assert not site.master.queries


async def test_without_a_picker_the_proxy_refuses_or_goes_on_as_it_was_told(
    tmp_path: Path,
) -> None:
    async def stop_pickers(site: PickedSite) -> None:
        for gateway in site.gateways:
            assert gateway.picker is not None
            await gateway.picker.stop(0)

        async def is_known() -> bool:
            return await site.envoy.counter("cluster.picker.membership_healthy") == 0

        await until(is_known)

    (tmp_path / "closed").mkdir()
    async with picked_site(tmp_path / "closed") as site:
        await stop_pickers(site)
        assert (await site.ask()).status_code == 500
        assert not site.prefills()
    (tmp_path / "open").mkdir()
    async with picked_site(tmp_path / "open", failing_open) as site:
        await stop_pickers(site)
        # A client may send the picker's headers, but the proxy must not follow them.
        other = httpx.Headers({"x-gateway-destination-endpoint": "127.0.0.1:1"})
        forged = httpx.Headers({"x-pdmesh-plan": "AAAA"})
        for headers in (other, forged):
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 8}
            answer = await site.client.post("/v1/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["text"] == site.mesh.expected_text("abc", 8)
        assert len(site.master.queries) == 2


async def test_when_a_picker_is_gone_another_one_is_asked(tmp_path: Path) -> None:
    async with picked_site(tmp_path) as site:
        assert site.gateways[0].picker is not None
        await site.gateways[0].picker.stop(0)
        for number in range(6):
            assert (await site.ask(f"abc {number}")).status_code == 200
        assert len(site.master.queries) == 6
