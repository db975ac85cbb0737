"""Tests the refusals of the endpoint picker. Proxies ask the picker which gateway should take a
request. The picker's answers must equal those of a gateway. It may hold only a bounded number of
bytes of requests that are under way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.services.gateway.access.access_control import KeyedAccess
from pdmesh.v1.scheduler_service_pb2 import ScenarioPressure, ScenarioQueue
from tests.fakes.fake_master import FakeMaster
from tests.integration.gateway.picker.modes import (
    as_deployed,
    buffered,
    by_header,
    failing_open,
    streamed,
)
from tests.support.proxies.envoy import Config
from tests.support.proxies.picked_site import PickedSite, picked_site
from tests.support.waiting import until

BOTH: Any = [as_deployed, buffered]
MAX_BODY = 64 << 10


def error_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def num_held(site: PickedSite) -> int:
    return sum(g.http_app.body_room.num_bytes for g in site.gateways)


def num_streams(site: PickedSite) -> int:
    return sum(g.picker.servicer.num_streams for g in site.gateways if g.picker is not None)


@pytest.mark.parametrize("change", BOTH)
async def test_without_an_endpoint_the_client_gets_a_503(tmp_path: Path, change: Any) -> None:
    async with picked_site(tmp_path, change) as site:
        for number in (0, 1):
            site.record(number, is_draining=True)
        answer = await site.ask()
        assert error_of(answer) == (503, "no_endpoint")
        assert answer.json()["error"]["message"] == "no gateway takes requests now"
        assert answer.headers["retry-after"] == "1"
        assert (await site.client.get("/v1/models")).status_code == 503
        for number in (0, 1):
            site.record(number)
        assert (await site.ask()).status_code == 200


@pytest.mark.parametrize("change", BOTH)
async def test_without_an_instance_the_client_gets_a_503(tmp_path: Path, change: Any) -> None:
    async with picked_site(tmp_path, change) as site:
        site.master.error = ("NO_INSTANCE", "no prefill is ready")
        answer = await site.ask()
        assert error_of(answer) == (503, "no_instance")
        assert answer.json()["error"]["message"] == "no prefill is ready"
        assert answer.headers["content-type"] == "application/json"


async def test_a_scenario_s_text_comes_from_a_gateway_as_ever(tmp_path: Path) -> None:
    scenarios = {"default": {"default_text": "Come back later."}}
    async with picked_site(tmp_path, scenarios=scenarios, ttft_s=0.2) as site:
        site.master.error = ("NO_INSTANCE", "no prefill is ready")
        answer = await site.ask()
        assert answer.json()["choices"][0]["text"] == "Come back later."


@pytest.mark.parametrize("change", BOTH)
async def test_while_its_queue_is_full_a_request_gets_a_429(tmp_path: Path, change: Any) -> None:
    async with picked_site(tmp_path, change) as site:
        queue = ScenarioQueue(scenario="default", num_waiting={0: 10})
        full = ScenarioPressure(queue=queue, max_waiting=10, prefills_per_s=2)
        site.master.pressures.append(full)
        # The plan for this request tells the picker how long the queue is.
        assert (await site.ask()).status_code == 200
        answers = [await site.ask() for _ in range(6)]
        refused = [a for a in answers if a.status_code != 200]
        assert refused
        for answer in refused:
            assert error_of(answer) == (429, "queue_full")
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        assert len(site.master.queries) <= 2  # each of the two pickers asks at most once


MALFORMED: Any = {
    "no JSON": (b"{", 400),
    "nothing": (b"", 400),
    "a wrong type": (b'{"model": "tiny", "prompt": {}}', 400),
    "no prompt": (b'{"model": "tiny"}', 400),
    "another model": (b'{"model": "other", "prompt": "abc"}', 404),
    "too long": (json.dumps({"model": "tiny", "prompt": [65] * 5000}).encode(), 400),
    "too many tokens": (b'{"model": "tiny", "prompt": "abc", "max_tokens": 5000}', 400),
}


@pytest.mark.parametrize("change", BOTH)
async def test_a_bad_body_gets_the_answer_that_a_gateway_gives(tmp_path: Path, change: Any) -> None:
    async with picked_site(tmp_path, change) as site:
        for what, (body, status) in MALFORMED.items():
            head = {"content-type": "application/json"}
            answer = await site.client.post("/v1/completions", content=body, headers=head)
            url = f"{site.mesh.url}/v1/completions"
            direct = await site.client.post(url, content=body, headers=head)
            assert answer.status_code == direct.status_code == status, what
            assert answer.json() == direct.json(), what
        assert not site.master.queries
        assert num_held(site) == 0


async def test_an_error_has_the_form_of_the_api_that_was_called(tmp_path: Path) -> None:
    async with picked_site(tmp_path) as site:
        answer = await site.client.post("/v1/messages", json={"model": "tiny", "messages": "abc"})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["request_id"] == answer.headers["request-id"]
        body = {"model": "tiny", "input": 5}
        assert (await site.client.post("/v1/responses", json=body)).json()["error"]["code"]


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, is_announced: bool
) -> None:
    async with picked_site(tmp_path, max_body_bytes=MAX_BODY) as site:
        read, write = await asyncio.open_connection(*site.envoy.address)
        size = 64 * MAX_BODY
        length = f"content-length: {size}" if is_announced else "transfer-encoding: chunked"
        head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\n{length}\r\n\r\n"
        write.write(head.encode())
        if not is_announced:
            write.write(b"%x\r\n" % size + b" " * (2 * MAX_BODY))
        answer = await asyncio.wait_for(read.read(4096), 60)
        assert b"413 Payload Too Large" in answer
        assert b'"code":"body_too_large"' in answer
        write.close()
        await until(lambda: num_held(site) == 0 and num_streams(site) == 0)


async def test_bodies_that_never_end_take_bounded_memory_and_time(tmp_path: Path) -> None:
    bounds: Any = {"max_incoming_bytes": 4 * MAX_BODY, "receive_timeout_s": 3.0}
    async with picked_site(tmp_path, max_body_bytes=MAX_BODY, **bounds) as site:
        most = 0

        async def send() -> bytes:
            nonlocal most
            read, write = await asyncio.open_connection(*site.envoy.address)
            head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
            piece = MAX_BODY - 1
            write.write(head.encode() + b"%x\r\n" % piece + b" " * piece + b"\r\n")
            answer = await asyncio.wait_for(read.read(4096), 100)
            most = max(most, *(g.http_app.body_room.num_bytes for g in site.gateways))
            write.close()
            return answer

        answers = await asyncio.gather(*(send() for _ in range(40)))
        statuses = [int(answer.split()[1]) for answer in answers]
        # There was no room for the body, or the body did not come in time.
        assert set(statuses) == {429, 504}
        assert most <= 4 * MAX_BODY
        await until(lambda: num_held(site) == 0 and num_streams(site) == 0)
        assert (await site.ask()).status_code == 200


@pytest.mark.parametrize("change", BOTH)
async def test_a_client_that_hangs_up_leaves_nothing_behind(tmp_path: Path, change: Any) -> None:
    async with picked_site(tmp_path, change) as site:
        read, write = await asyncio.open_connection(*site.envoy.address)
        head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 5000\r\n\r\n"
        write.write(head.encode() + b"x" * 2000)
        await until(lambda: num_streams(site) == 1)
        if change is as_deployed:
            await until(lambda: num_held(site) == 2000)
        write.close()
        await until(lambda: num_streams(site) == 0)
        assert num_held(site) == 0
        del read


async def test_a_client_that_hangs_up_while_its_plan_is_made_gets_none(tmp_path: Path) -> None:
    async with picked_site(tmp_path) as site:
        site.master.is_silent = True
        asked = asyncio.create_task(site.ask())
        await until(lambda: num_streams(site) == 1)
        asked.cancel()
        await until(lambda: num_streams(site) == 0)
        site.master.is_silent = False
        assert (await site.ask()).status_code == 200
        assert len(site.prefills()) == 1
        assert isinstance(site.master, FakeMaster)


async def test_a_proxy_that_does_not_show_bodies_is_told_so(tmp_path: Path) -> None:
    async with picked_site(tmp_path, streamed) as site:
        answer = await site.ask()
        assert error_of(answer) == (500, "wrong_processing_mode")
        assert answer.json()["error"]["param"] == "processing_mode.request_body_mode"
        assert (await site.client.get("/v1/models")).status_code == 200


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [as_deployed, by_header, failing_open])
async def test_clients_cannot_name_an_endpoint_or_a_plan(
    tmp_path: Path, change: Callable[[Config], None]
) -> None:
    async with picked_site(tmp_path, change) as site:
        for number in range(4):
            headers = {
                "x-gateway-destination-endpoint": "127.0.0.1:1",
                "x-pdmesh-plan": "bm90aGluZw==",
            }
            body = {"model": "tiny", "prompt": f"abc {number}", "max_tokens": 4}
            answer = await site.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-request-id"] == site.master.queries[-1].request_id
            models = await site.client.get("/v1/models", headers=headers)
            assert models.status_code == 200
        assert len(site.master.queries) == 4


async def test_a_client_without_a_key_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    file = KeyFile()
    key = api_keys.issue(file, "acme")
    api_keys.save(tmp_path / "keys.json", file)
    async with picked_site(tmp_path, access=KeyedAccess(tmp_path / "keys.json")) as site:
        read, write = await asyncio.open_connection(*site.envoy.address)
        head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 5000\r\n"
        write.write(f"{head}authorization: Bearer wrong\r\n\r\n".encode())
        answer = await asyncio.wait_for(read.read(4096), 60)
        write.close()
        assert b"401 Unauthorized" in answer
        assert b"www-authenticate: Bearer" in answer
        bare = await site.ask()
        assert error_of(bare) == (401, "invalid_api_key")
        assert not site.master.queries
        site.client.headers["authorization"] = f"Bearer {key}"
        assert (await site.ask()).status_code == 200
        del site.client.headers["authorization"]
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        anthropic = await site.client.post("/v1/messages", json=body, headers={"x-api-key": key})
        assert anthropic.status_code == 200, anthropic.text
        assert len(site.master.queries) == 2
