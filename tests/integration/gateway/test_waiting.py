"""Tests the waiting room, in which requests wait for a slot of an instance. Tests which request
goes first, which one is evicted, and what happens at the deadline.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.instance import free_slots
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.services.gateway.access.access_control import KeyedAccess
from pdmesh.services.gateway.request import frontend
from pdmesh.telemetry import names
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_FUSION
from pdmesh.v1.instance_service_pb2 import REJECT_REASON_BUSY
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


async def ask(client: httpx.AsyncClient, token: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return await client.post("/v1/completions", json={**BODY, **fields}, headers=headers)


def keys(directory: Path, **tenants: TenantEntry) -> tuple[KeyedAccess, dict[str, str]]:
    file = KeyFile(tenants=dict(tenants))
    tokens = {name: api_keys.issue(file, name) for name in tenants}
    api_keys.save(directory / "keys.json", file)
    return KeyedAccess(directory / "keys.json"), tokens


class CounterOfCounts:
    def __init__(self) -> None:
        self.counted: list[tuple[int, dict[str, str]]] = []

    def add(self, amount: int, labels: dict[str, str]) -> None:
        self.counted.append((amount, labels))


def room(mesh: GatewayMesh) -> int:
    return len(mesh.gateway.frontend.shared.room)


@pytest.mark.req("S44")
async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """Forty requests of one tenant wait when two of another tenant come. The two evict two of the
    forty, and get two of the first four slots although they came last.
    """
    access, tokens = keys(tmp_path, flood=TenantEntry(), quiet=TenantEntry())
    async with (
        gateway_mesh(tmp_path, access=access, ttft_s=30.0, retry_s=25.0, max_waiting=40) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        flood = [asyncio.create_task(ask(client, tokens["flood"])) for _ in range(40)]
        await until(lambda: room(mesh) == 40)
        too_many = await ask(client, tokens["flood"])
        assert too_many.status_code == 429
        quiet = [asyncio.create_task(ask(client, tokens["quiet"])) for _ in range(2)]
        await until(lambda: sum(t.done() for t in flood) == 2)
        evicted = [t.result() for t in flood if t.done()]
        assert {r.status_code for r in evicted} == {429}
        assert all(int(r.headers["retry-after"]) >= 1 for r in evicted)
        assert room(mesh) == 40
        prefill.is_holding = True
        prefill.free_slots(4)
        await until(lambda: len(prefill.legs) == 4)
        salts = [p.cache_salt for p in prefill.prefills[-4:]]
        assert len(set(salts)) == 2
        assert sorted(salts.count(s) for s in set(salts)) == [2, 2]
        for task in (*flood, *quiet):
            task.cancel()
        await asyncio.gather(*flood, *quiet, return_exceptions=True)
        await until(lambda: room(mesh) == 0 and mesh.num_legs == 0)


@pytest.mark.req("S40", "S41")
async def test_prompts_are_offered_only_where_a_slot_may_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected offer costs two messages, one of them with the whole prompt."""
    monkeypatch.setattr(free_slots, "TRUST_S", 600.0)
    async with (
        gateway_mesh(tmp_path, ttft_s=300.0, retry_s=0.05) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=300) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        assert (await ask(client)).status_code == 200, "the session is open now"
        prefill.is_holding = True
        prefill.free_slots(2)
        session = mesh.gateway.frontend.shared.sessions.session(prefill.record())
        await until(lambda: session.slots.num_free == 2)
        asks = [asyncio.create_task(ask(client, prompt="abc" * n)) for n in range(1, 11)]
        await until(lambda: len(prefill.legs) == 2 and room(mesh) == 8)
        assert len(prefill.prefills) == 3
        prefill.finish_prefills()
        prefill.free_slots(1 << 20)
        assert {(await each).status_code for each in asks} == {200}
        assert (len(prefill.prefills), prefill.num_rejected) == (11, 0)


@pytest.mark.req("S40", "S44")
async def test_a_client_that_leaves_before_the_answer_leaves_its_slot_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_slots, "TRUST_S", 600.0)
    async with (
        gateway_mesh(tmp_path, ttft_s=300.0, retry_s=250.0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        assert (await ask(client)).status_code == 200, "the session is open now"
        prefill.free_slots(1)
        session = mesh.gateway.frontend.shared.sessions.session(prefill.record())
        await until(lambda: session.slots.num_free == 1)
        prefill.is_silent = True
        leaving = asyncio.create_task(ask(client, prompt="first"))
        await until(lambda: len(prefill.prefills) == 2)
        waiting = asyncio.create_task(ask(client, prompt="second"))
        await until(lambda: room(mesh) == 1)
        prefill.is_silent = False
        leaving.cancel()
        assert (await waiting).status_code == 200
        assert (len(prefill.prefills), prefill.num_rejected) == (3, 0)


@pytest.mark.req("S40")
async def test_a_full_instance_that_tells_nothing_is_asked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance of an older release may not report its free slots."""
    monkeypatch.setattr(free_slots, "TRUST_S", 0.2)
    async with (
        gateway_mesh(tmp_path, ttft_s=300.0, retry_s=0.05) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=300) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        asked = asyncio.create_task(ask(client))
        await until(lambda: prefill.num_rejected == 1)
        prefill.reject_with = None  # no Load event reports the free slot
        assert (await asked).status_code == 200


@pytest.mark.req("S44")
async def test_a_more_urgent_tenant_is_called_first(tmp_path: Path) -> None:
    access, tokens = keys(tmp_path, batch=TenantEntry(priority=5), chat=TenantEntry(priority=0))
    async with (
        gateway_mesh(tmp_path, access=access, ttft_s=30.0, retry_s=25.0) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        batch = asyncio.create_task(ask(client, tokens["batch"]))
        await until(lambda: room(mesh) == 1)
        chat = asyncio.create_task(ask(client, tokens["chat"]))
        await until(lambda: room(mesh) == 2)
        depths = {labels["priority"]: n for n, labels in mesh.gateway.frontend.shared.room.depths()}
        assert depths == {"0": 1, "1": 0, "5": 1}
        prefill.is_holding = True
        prefill.free_slots(1)
        await until(lambda: len(prefill.legs) == 1)
        assert room(mesh) == 1
        assert prefill.prefills[-1].cache_salt == prefill.prefills[1].cache_salt, (
            "the request of tenant chat, which came second"
        )
        for task in (batch, chat):
            task.cancel()
        await asyncio.gather(batch, chat, return_exceptions=True)


@pytest.mark.req("S83")
async def test_both_roles_are_told_how_urgent_a_request_is(tmp_path: Path) -> None:
    """Engines order their requests by priority, even if no request waits for a slot."""
    access, tokens = keys(tmp_path, batch=TenantEntry(priority=5), chat=TenantEntry(priority=0))
    async with (
        gateway_mesh(tmp_path, access=access) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for tenant in ("batch", "chat"):
            assert (await ask(client, tokens[tenant])).status_code == 200
        prefill, decode = mesh.instances["prefill-0"], mesh.instances["decode-0"]
        assert [asked.priority for asked in prefill.prefills] == [5, 0]
        assert [asked.priority for asked in decode.starts] == [5, 0]


@pytest.mark.req("S90", "S91")
async def test_waiting_requests_go_in_batches_of_similar_length(tmp_path: Path) -> None:
    """A batch of two requests waits while a slot for only one is free. When two slots are free, the
    two long requests go together, although a short one came between them.
    """
    async with (
        gateway_mesh(tmp_path, ttft_s=30.0, retry_s=25.0, prefill_batch=2) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        prompts = ("a " * 300, "b", "c " * 310)
        asks: list[asyncio.Task[httpx.Response]] = []
        for number, prompt in enumerate(prompts, start=1):
            asks.append(asyncio.create_task(ask(client, prompt=prompt)))
            await until(lambda number=number: room(mesh) == number)
        prefill.is_holding = True
        prefill.free_slots(1)
        prefill.free_slots(2)
        await until(lambda: len(prefill.legs) == 2)
        assert room(mesh) == 1
        assert min(len(p.prompt_token_ids) for p in prefill.prefills[-2:]) > 4 * 200
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


@pytest.mark.req("S46", "S90")
async def test_a_lone_prompt_waits_for_no_others(tmp_path: Path) -> None:
    """The prefill could compute four prompts at a time, but only one request comes."""
    async with (
        gateway_mesh(tmp_path, ttft_s=300.0, retry_s=250.0, prefill_batch=4) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=300) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        assert (await ask(client)).status_code == 200, "an idle prefill"
        prefill.reject_with = REJECT_REASON_BUSY
        asked = asyncio.create_task(ask(client))
        await until(lambda: room(mesh) == 1)
        prefill.free_slots(1)
        assert (await asked).status_code == 200, "a prefill that became free"


@pytest.mark.req("S44", "S9")
async def test_requests_end_at_their_deadlines_and_in_their_order(tmp_path: Path) -> None:
    """Sixty requests of two scenarios and two lengths wait for slots that never become free. Each
    must end at its own deadline and never reach an instance afterwards.
    """
    scenarios = {"quick": {"ttft_s": 1.0, "ttft_s_per_1k_tokens": 4.0}, "slow": {"ttft_s": 6.0}}
    async with (
        gateway_mesh(tmp_path, scenarios=scenarios, retry_s=500.0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        prefill = mesh.instances["prefill-0"]
        prefill.reject_with = REJECT_REASON_BUSY
        for instance in mesh.instances.values():
            record = instance.record()
            record.scenario = ""
            mesh.register(record)
        asks = [
            ask(client, prompt="x" * length, scenario=scenario)
            for scenario in ("quick", "slow")
            for length in (1, 500)
            for _ in range(15)
        ]
        answers = await asyncio.gather(*asks)
        assert {a.status_code for a in answers} == {429}
        assert {a.headers["retry-after"] for a in answers} == {"1"}
        await until(lambda: len(mesh.events) == 60)
        dues_ms = []
        for event in mesh.events:
            quick_s = 1.0 + 4.0 * event.usage.num_prompt_tokens / 1000
            dues_ms.append(1000 * (quick_s if event.scenario == "quick" else 6.0))
            assert event.e2e_ms >= dues_ms[-1] - 1
        assert len(set(dues_ms)) == 3
        assert dues_ms == sorted(dues_ms), "the one that is due first ends first"
        num_asked = len(prefill.prefills)
        prefill.free_slots(64)
        assert len(prefill.prefills) == num_asked
        assert room(mesh) == 0


@pytest.mark.req("S44")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_scenario_may_answer_with_its_default_text(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slo = CounterOfCounts()
    monkeypatch.setattr(frontend, "_ttft_slo", slo)
    scenarios = {"shop": {"ttft_s": 0.1, "default_text": "Please ask again in a minute."}}
    async with (
        gateway_mesh(tmp_path, scenarios=scenarios) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for instance in mesh.instances.values():
            instance.reject_with = REJECT_REASON_BUSY
            record = instance.record()
            record.scenario = "shop"
            mesh.register(record)
        answer: Any = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            stream=stream,
            extra_body={"scenario": "shop"},
        )
        if stream:
            chunks = [c.choices[0] async for c in answer]
            text = "".join(c.delta.content or "" for c in chunks)
            finish_reason = chunks[-1].finish_reason
        else:
            text = answer.choices[0].message.content
            finish_reason = answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == 0
        assert (text, finish_reason) == ("Please ask again in a minute.", "stop")
        await until(lambda: bool(mesh.events))
        assert (mesh.events[-1].outcome, mesh.events[-1].reason) == ("failed", "OVERLOADED")
        assert slo.counted == [(1, {names.ATTR_SCENARIO: "shop", names.ATTR_OUTCOME: "missed"})]


@pytest.mark.fault("F38")
async def test_a_poisonous_prompt_kills_two_instances_and_no_more(tmp_path: Path) -> None:
    """The prompt kills every instance that takes it. Its client tries again and again, while other
    requests continue.
    """
    async with (
        gateway_mesh(tmp_path, 0, 0, num_fusions=4) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        deaths = 0

        async def kill_each_taker() -> None:
            nonlocal deaths
            while True:
                for instance in mesh.instances.values():
                    if any(bytes(p.prompt_token_ids) == poison for p in instance.prefills):
                        deaths += 1
                        instance.prefills.clear()
                        instance.break_sessions()
                await asyncio.sleep(0.001)

        ids = list(mesh.tokenizer._encode("poison", add_special_tokens=True))
        poison = b"".join(i.to_bytes(4, "little") for i in ids)
        for instance in mesh.instances.values():
            assert instance.role == ROLE_FUSION
            instance.is_holding = True
        killer = asyncio.create_task(kill_each_taker())
        first = await ask(client, prompt="poison")
        assert (first.status_code, first.json()["error"]["code"]) == (500, "poison_request")
        assert "retry-after" not in first.headers
        for _ in range(3):
            again = await ask(client, prompt="poison", max_tokens=9)
            assert (again.status_code, again.json()["error"]["code"]) == (500, "poison_request")
        assert deaths == 2
        killer.cancel()
        for instance in mesh.instances.values():
            instance.is_holding = False

        async def is_served() -> bool:
            return (await ask(client)).status_code == 200

        await until(is_served)


@pytest.mark.fault("F38")
async def test_a_death_that_several_choices_or_clients_saw_counts_once(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path, 0, 0, num_fusions=1, max_migrations=0) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        fusion = mesh.instances["fusion-0"]
        fusion.is_holding = True
        asking = [asyncio.create_task(ask(client, n=2)), asyncio.create_task(ask(client))]
        await until(lambda: len(fusion.legs) == 3)
        fusion.break_sessions()
        assert [(await asked).status_code for asked in asking] == [503, 503]
        assert len(mesh.gateway.frontend.shared.poison) == 1
        fusion.is_holding = False

        async def is_served() -> bool:
            answer = await ask(client)
            assert answer.status_code in {200, 503}, answer.text
            return answer.status_code == 200

        await until(is_served)
        assert not mesh.gateway.frontend.shared.poison, (
            "the prompt was answered, so it is no poison"
        )


async def test_an_idle_mesh_makes_no_request_wait(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that finds a free slot must not enter the waiting room."""

    def forbidden(*_: object) -> None:
        raise AssertionError("joined the waiting room")

    monkeypatch.setattr(mesh.gateway.frontend.shared.room, "join", forbidden)
    for _ in range(20):
        answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
        assert answer.choices[0].finish_reason == "length"
    assert any(i.starts for i in mesh.instances.values() if i.role == ROLE_DECODE)
