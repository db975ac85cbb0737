"""Tests faults of instances, masters and connections behind the gateway. Each fault must be
invisible to the client, or cause one clear error.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from pdmesh.services.gateway.routing.fleet import Wanted
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from pdmesh.v1.instance_service_pb2 import (
    REJECT_REASON_BUSY,
    REJECT_REASON_DRAINING,
    REJECT_REASON_TOO_LONG,
)
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support import kv_bounds
from tests.support.waiting import until


def decode_at_work(mesh: GatewayMesh) -> FakeInstance:
    return next(i for i in mesh.instances.values() if i.role == ROLE_DECODE and i.legs)


def of_role(mesh: GatewayMesh, role: int) -> list[FakeInstance]:
    return [i for i in mesh.instances.values() if i.role == role]


@pytest.mark.fault("F7")
async def test_a_lost_decode_is_replaced_and_the_text_is_unbroken(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for instance in mesh.instances.values():
        instance.step_s = 0.002
    stream = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=120, stream=True
    )
    text = ""
    num_broken = 0
    async for chunk in stream:
        text += chunk.choices[0].text
        if len(text) > 30 * (num_broken + 1) and num_broken < 2:
            num_broken += 1
            decode_at_work(mesh).break_sessions()
    assert num_broken == 2
    assert text == mesh.expected_text("abc", 120)
    assert mesh.num_legs == 0


@pytest.mark.fault("F7")
@pytest.mark.parametrize("kv_transfer", ["whole", "per_layer"])
async def test_a_seeded_answer_is_the_same_with_a_death_at_any_token(
    tmp_path: Path, kv_transfer: str
) -> None:
    """The random number for a token depends on the token's position, not on the instance that draws
    it.
    """
    async with (
        gateway_mesh(tmp_path, 2, 2, kv_transfer=kv_transfer) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        expected = mesh.expected_text("abc", 20, seed=11)
        assert expected != mesh.expected_text("abc", 20)
        decodes = of_role(mesh, ROLE_DECODE)
        for position in range(2, 20):
            for decode in decodes:
                decode.breaks_at = position
            answer = await client.completions.create(
                model="tiny", prompt="abc", max_tokens=20, seed=11
            )
            assert answer.choices[0].text == expected, position
            assert any(decode.breaks_at is None for decode in decodes)
        starts = [start for i in mesh.instances.values() for start in i.starts]
        assert len(starts) > 18
        assert all(s.awaits_first_token == (kv_transfer == "per_layer") for s in starts)


@pytest.mark.req("S37")
async def test_each_choice_has_a_seed_of_its_own(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=20, seed=-2, n=3
    )
    expected = [mesh.expected_text("abc", 20, seed=seed) for seed in (-2, -1, 0)]
    assert [choice.text for choice in answer.choices] == expected


@pytest.mark.fault("F7")
async def test_after_the_last_migration_there_is_one_error_event_and_no_done(
    tmp_path: Path,
) -> None:
    async with gateway_mesh(tmp_path, 1, 1, max_migrations=0) as mesh:
        for instance in mesh.instances.values():
            instance.step_s = 0.002
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 1000, "stream": True}
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{mesh.url}/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) == 4:
                    decode_at_work(mesh).break_sessions()
        events = [line.removeprefix("data: ") for line in lines if line]
        errors = [json.loads(e)["error"] for e in events if "error" in e]
        assert [e["code"] for e in errors] == ["upstream_failed"]
        assert json.loads(events[-1])["error"]
        assert "[DONE]" not in events
        await until(lambda: mesh.num_legs == 0)


@pytest.mark.fault("F1")
async def test_a_prefill_lost_while_it_computes_is_replaced(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for instance in of_role(mesh, ROLE_PREFILL):
        instance.is_holding = True
    asking = asyncio.create_task(
        client.completions.create(model="tiny", prompt="abc", max_tokens=5)
    )
    await until(lambda: any(i.legs for i in of_role(mesh, ROLE_PREFILL)))
    busy = next(i for i in of_role(mesh, ROLE_PREFILL) if i.legs)
    for instance in of_role(mesh, ROLE_PREFILL):
        instance.is_holding = False
    busy.break_sessions()
    assert (await asking).choices[0].text == mesh.expected_text("abc", 5)


@pytest.mark.req("S43")
async def test_a_rejection_sends_the_request_to_the_next_candidate(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    prefills, decodes = mesh.gateway.fleet.least_loaded(Wanted("tiny"), "", (), lambda *_: 0)
    first, second = (mesh.instances[c.instance_id] for c in prefills)
    first.reject_with = REJECT_REASON_DRAINING
    mesh.instances[decodes[0].instance_id].reject_with = REJECT_REASON_BUSY
    answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=9)
    assert answer.choices[0].text == mesh.expected_text("abc", 9)
    assert (first.num_rejected, len(second.prefills)) == (1, 1)
    assert not first.aborted, "a rejected leg holds nothing"
    await until(lambda: bool(mesh.events))
    assert mesh.events[-1].num_rejections == 2
    assert mesh.events[-1].num_migrations == 0, "a rejection is no failure"


@pytest.mark.req("S44")
async def test_when_all_stay_busy_the_client_gets_429_at_its_deadline(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, ttft_s=0.4) as mesh, httpx.AsyncClient(timeout=60) as client:
        mesh.instances["prefill-0"].reject_with = REJECT_REASON_BUSY
        began = time.monotonic()
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "stream": True}
        response = await client.post(f"{mesh.url}/v1/completions", json=body)
        took_s = time.monotonic() - began
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert took_s > 0.39, (
            "the gateway answers at the deadline; a timeout of the client would raise"
        )


@pytest.mark.req("S43", "S44")
async def test_a_waiting_request_is_forwarded_the_moment_a_slot_frees(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, ttft_s=600.0, retry_s=500.0) as mesh,
        httpx.AsyncClient(timeout=60) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
        asking = asyncio.create_task(client.post(f"{mesh.url}/v1/completions", json=body))
        await until(lambda: len(mesh.gateway.frontend.shared.room) == 1)
        # Without this report, the gateway would not offer the request again before the client's
        # timeout.
        prefill.free_slots(4)
        assert (await asking).json()["choices"][0]["text"] == mesh.expected_text("abc", 4)
        assert len(mesh.gateway.frontend.shared.room) == 0


async def test_a_full_waiting_room_answers_429_at_once(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, max_waiting=0, ttft_s=600.0) as mesh,
        httpx.AsyncClient(timeout=60) as client,
    ):
        mesh.instances["prefill-0"].reject_with = REJECT_REASON_BUSY
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
        response = await client.post(f"{mesh.url}/v1/completions", json=body)
        assert response.status_code == 429, "the request is refused before its deadline"


async def test_a_prompt_that_fits_no_instance_is_the_clients_error(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for instance in of_role(mesh, ROLE_PREFILL):
        instance.reject_with = REJECT_REASON_TOO_LONG
    answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert answer.choices[0].text == mesh.expected_text("abc", 4), "a decode does both phases"
    for instance in mesh.instances.values():
        instance.reject_with = REJECT_REASON_TOO_LONG
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="a" * 5000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


async def test_without_max_tokens_the_rest_of_the_context_is_the_limit(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    prompt = "a" * 4093
    answer = await client.completions.create(model="tiny", prompt=prompt)
    assert answer.choices[0].text == mesh.expected_text(prompt, 3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=16)
    assert caught.value.param == "max_tokens"


@pytest.mark.fault("F8")
async def test_a_silent_decode_is_given_up_and_its_late_output_is_dropped(
    tmp_path: Path,
) -> None:
    async with (
        gateway_mesh(tmp_path, 1, 2, stall_s=2.0) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        for instance in of_role(mesh, ROLE_DECODE):
            instance.step_s = 0.002
        stream = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=60, stream=True
        )
        text, frozen = "", None
        async for chunk in stream:
            text += chunk.choices[0].text
            if frozen is None and len(text) > 20:
                frozen = decode_at_work(mesh)
                frozen.step_s = 4.0
        assert text == mesh.expected_text("abc", 60)
        assert frozen is not None
        await until(lambda: bool(frozen.aborted))
        await until(lambda: mesh.num_legs == 0)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("num_tokens", [0, 10**6], ids=["stands-still", "computes-past-it"])
async def test_a_prefill_whose_engine_does_not_serve_it_is_left_and_another_answers(
    tmp_path: Path, num_tokens: int
) -> None:
    async with (
        gateway_mesh(tmp_path, 2, 1, stall_s=0.3, ttft_s=600.0, answer_s=60.0) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        prefills = of_role(mesh, ROLE_PREFILL)
        for prefill in prefills:
            prefill.is_holding = True
        asking = asyncio.create_task(
            client.completions.create(model="tiny", prompt="abc", max_tokens=5)
        )
        await until(lambda: any(p.legs for p in prefills))
        hung = next(p for p in prefills if p.legs)
        for prefill in prefills:
            prefill.is_holding = prefill is hung
        num_told = 0
        while not hung.aborted:
            hung.tell_progress(bool(num_tokens) * num_told, num_tokens * num_told, 100)
            num_told += 1
            await asyncio.sleep(0.02)
        assert (await asking).choices[0].text == mesh.expected_text("abc", 5)
        await until(lambda: bool(mesh.events))
        assert mesh.events[-1].num_migrations == 1


@pytest.mark.req("S41")
async def test_a_request_waits_for_an_older_prefill_that_reports_no_progress(
    tmp_path: Path,
) -> None:
    async with (
        gateway_mesh(tmp_path, 1, 1, stall_s=1.0, ttft_s=1.0) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.prefill_s = 6.0
        answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=5)
        assert answer.choices[0].text == mesh.expected_text("abc", 5)
        assert not prefill.aborted
        await until(lambda: bool(mesh.events))
        assert mesh.events[-1].num_migrations == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def left_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    """A mesh with one prefill and one decode, for tests in which every client leaves."""
    async with gateway_mesh(tmp_path_factory.mktemp("left")) as mesh:
        mesh.instances["decode-0"].step_s = 0.01
        yield mesh


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-close":
        writer.write_eof()
        return
    if how == "RST":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.fault("F27")
@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode admission", "decoding"])
@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
async def test_a_client_that_leaves_frees_everything(
    left_mesh: GatewayMesh, stage: str, how: str, padding: int
) -> None:
    """While the server holds a large body, it stops reading from the connection, and then might not
    notice that the client leaves.

    A client that closes only its sending half looks like a client that died. The gateway treats it
    as gone and closes the connection.
    """
    mesh = left_mesh
    prefill, decode = mesh.instances["prefill-0"], mesh.instances["decode-0"]
    prefill.is_holding = stage == "prefill"
    decode.is_silent = stage == "decode admission"
    prefill.reject_with = REJECT_REASON_BUSY if stage == "waiting" else None
    num_starts, num_released = len(decode.starts), len(prefill.released)
    num_cancelled = mesh.gateway.observer.num_ended["cancelled"]
    reached = {
        "waiting": lambda: len(mesh.gateway.frontend.shared.room) == 1,
        "prefill": lambda: bool(prefill.legs),
        "decode admission": lambda: len(decode.starts) > num_starts and bool(prefill.tickets),
        "decoding": lambda: bool(decode.legs),
    }[stage]
    port = mesh.gateway.http.port
    body = b'{"model":"tiny","prompt":"abc","max_tokens":4000,"stream":true}' + b" " * padding
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(reached)
    leave(writer, how)
    took_s = await until(lambda: mesh.gateway.frontend.num_calls == 0 and mesh.num_legs == 0)
    what = f"a client leaves by {how}; time until all its work has stopped and its KV is free"
    kv_bounds.judge("F27", what, took_s=took_s, bound_s=1.0)
    if stage == "decode admission":
        assert len(prefill.released) == num_released + 1, "the ticket is released explicitly"
    assert mesh.gateway.sessions.counts()[1] == 0
    assert len(mesh.gateway.frontend.shared.room) == 0
    assert mesh.gateway.observer.num_ended["cancelled"] == num_cancelled + 1
    await until(lambda: mesh.gateway.http.num_connections == 0)
    if how == "half-close":
        rest = await reader.read()
        assert b"[DONE]" not in rest, "the leg ends because the client's stream is closed"
        writer.close()


@pytest.mark.req("S72")
async def test_fusion_gives_the_same_answer(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, 0, 0, num_fusions=1) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=30)
        assert answer.choices[0].text == mesh.expected_text("abc", 30)
        fusion = mesh.instances["fusion-0"]
        assert fusion.prefills[0].is_local
        assert not fusion.starts


async def test_a_request_that_no_instance_can_serve_fails_at_once(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, 0, 0, model="tiny") as mesh,
        httpx.AsyncClient() as client,
    ):
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
        response = await client.post(f"{mesh.url}/v1/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_instance"
        assert (await client.get(f"{mesh.url}/health/ready")).status_code == 503
        assert (await client.get(f"{mesh.url}/health/live")).status_code == 200


@pytest.mark.fault("F10")
async def test_stopping_lets_a_stream_finish_and_refuses_new_requests(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, drain_s=60.0) as mesh, httpx.AsyncClient() as client:
        mesh.instances["decode-0"].step_s = 0.005
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 100, "stream": True}
        async with client.stream("POST", f"{mesh.url}/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(mesh.gateway.stop())
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await client.post(f"{mesh.url}/v1/completions", json=body)


@pytest.mark.fault("F10")
async def test_a_stream_that_outlives_the_drain_gets_one_error_event(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, drain_s=0.3) as mesh, httpx.AsyncClient() as client:
        mesh.instances["decode-0"].step_s = 0.02
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4000, "stream": True}
        async with client.stream("POST", f"{mesh.url}/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(mesh.gateway.stop())
            rest = [line async for line in lines if line]
        await stopping
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert mesh.gateway.observer.num_ended["failed"] == 1


@pytest.mark.fault("F28")
async def test_a_client_that_does_not_read_is_cut_and_frees_its_legs(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, write_timeout_s=0.5, chunk_interval_ms=0) as mesh:
        for instance in mesh.instances.values():
            instance.max_model_len = 1 << 22
            mesh.register(instance.record())
        body = b'{"model":"tiny","prompt":"abc","max_tokens":1000000,"stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", mesh.gateway.http.port))
            deaf.sendall(head.encode() + body)
            await until(lambda: mesh.gateway.frontend.num_calls == 1)
            await until(lambda: mesh.gateway.frontend.num_calls == 0, within_s=90.0)
            await until(lambda: mesh.num_legs == 0)
            assert mesh.gateway.observer.num_ended["cancelled"] == 1
            # The gateway drops data that the client never read, together with the connection.
            await until(lambda: mesh.gateway.http.num_connections == 0)


async def test_every_accepted_request_is_counted_once_by_its_end(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    asked = (
        client.completions.create(model="tiny", prompt=f"p{i}", max_tokens=1 + i % 5)
        for i in range(40)
    )
    await asyncio.gather(*asked)
    observer = mesh.gateway.observer
    await until(lambda: sum(observer.num_ended.values()) == 40)
    assert observer.num_accepted == observer.num_ended["completed"] == 40
    await until(lambda: len(mesh.events) == 40)
    assert {e.outcome for e in mesh.events} == {"completed"}
