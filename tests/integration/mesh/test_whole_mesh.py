"""Sends requests through all six services as real processes with simulated engines, and checks what
clients and operators see.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.otlp import OtlpCollector, SeenSpan
from tests.support.sites import fleet
from tests.support.streams import stream_completion
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The shortest lengths, and lengths around multiples of the block size 64.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 640)
CANARY = "xyzzy-canary-zebra"


def prompt_of(length: int) -> list[int]:
    return [40 + (i * 7 + length) % 80 for i in range(length)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> fleet.Reference:
    return fleet.Reference.load(tmp_path_factory.mktemp("sim-model"))


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    taken = OtlpCollector()
    yield taken
    taken.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpCollector
) -> AsyncIterator[Mesh]:
    spec = fleet.two_by_two(
        PDMESH_OTLP_ENDPOINT=collector.endpoint,
        OTEL_BSP_SCHEDULE_DELAY="200",
        OTEL_METRIC_EXPORT_INTERVAL="500",
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as running:
        yield running


@pytest.mark.req("S1", "S13", "S47", "S49")
async def test_every_prompt_length_and_pair_gives_the_text_of_one_model(
    mesh: Mesh, client: httpx.AsyncClient, reference: fleet.Reference
) -> None:
    asked = [(prompt_of(n), tokens) for n in LENGTHS for tokens in (1, 2, 12)]
    outcomes = await asyncio.gather(
        *(stream_completion(client, mesh.http_url, p, n, ignore_eos=True) for p, n in asked)
    )
    for (prompt, num_tokens), outcome in zip(asked, outcomes, strict=True):
        assert outcome.is_complete, outcome
        assert outcome.text == reference.text(prompt, num_tokens)
    await until(lambda: _nothing_held(mesh))


@pytest.mark.req("S72")
async def test_fusion_answers_as_the_disaggregated_mesh_does(
    tmp_path: Path, client: httpx.AsyncClient, reference: fleet.Reference
) -> None:
    spec = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_fusion=1, http_port=0, grpc_port=0
    )
    async with Mesh(spec, tmp_path) as fusion:
        for length in LENGTHS:
            prompt = prompt_of(length)
            outcome = await stream_completion(client, fusion.http_url, prompt, 12, ignore_eos=True)
            assert outcome.text == reference.text(prompt, 12)


@pytest.mark.req("S5")
async def test_a_repeated_prompt_is_served_from_the_prefill_that_holds_its_blocks(
    mesh: Mesh,
) -> None:
    """The index learns of stored blocks from events, which may take a moment. After that, every
    repeat finds its blocks, unless the master answers so late that the gateway ranks the instances
    itself.
    """
    ai = openai.AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="none")
    prompt = prompt_of(500)

    async def cached() -> int:
        answer = await ai.completions.create(model="default", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens if details else 0) or 0

    async def all_hit() -> bool:
        return [await cached() for _ in range(8)] == [448] * 8  # 448 tokens are 7 full blocks of 64

    assert await cached() == 0
    await until(all_hit)
    await ai.close()


@pytest.mark.fault("F27")
async def test_a_client_that_leaves_frees_everything_it_held(mesh: Mesh) -> None:
    """Clients drop their streams at many moments: in the queue, in prefill, in hand-over and in
    decode.
    """
    async with httpx.AsyncClient(timeout=30) as leaving:

        async def leave_after(seconds: float) -> None:
            stream = stream_completion(leaving, mesh.http_url, prompt_of(640), 500, ignore_eos=True)
            task = asyncio.create_task(stream)
            await asyncio.wait([task], timeout=seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(leave_after(0.002 * i) for i in range(60)))
    await until(lambda: _nothing_held(mesh))


async def test_one_trace_spans_all_services_of_a_request(
    mesh: Mesh, client: httpx.AsyncClient, collector: OtlpCollector
) -> None:
    traceparent = "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"
    answer = await client.post(
        f"{mesh.http_url}/v1/completions",
        json={"model": "default", "prompt": prompt_of(200), "max_tokens": 4, "ignore_eos": True},
        headers={"traceparent": traceparent},
    )
    assert answer.status_code == 200
    trace_id = traceparent.split("-")[1]
    expected = {
        ("gateway", "plan"),
        ("master-scheduler", "plan"),
        ("prefill", "prefill"),
        ("decode", "kv.transfer"),
        ("decode", "decode"),
    }

    def seen() -> set[tuple[str, str]]:
        return {(s.service, s.name) for s in collector.spans if s.trace_id == trace_id}

    await until(lambda: expected <= seen())
    mine = [s for s in collector.spans if s.trace_id == trace_id]
    legs = sorted(s.name for s in mine if s.name in {"prefill", "kv.transfer", "decode"})
    assert legs == ["decode", "kv.transfer", "prefill"], (
        "each stage has one span, from the process that did it"
    )
    roots = [s for s in mine if s.parent_id == "00f067aa0ba902b7"]
    assert [s.service for s in roots] == ["gateway"], "the client's span is the parent of ours"
    ids = {s.span_id for s in mine} | {"00f067aa0ba902b7"}
    assert all(s.parent_id in ids for s in mine), "every span has a parent in the trace"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_client_without_a_traceparent_gets_one_trace_over_all_services(
    mesh: Mesh, client: httpx.AsyncClient, collector: OtlpCollector, path: str
) -> None:
    asked = (
        {"messages": [{"role": "user", "content": "hi " * 40}]}
        if "chat" in path
        else {"prompt": prompt_of(210)}
    )
    answer = await client.post(
        f"{mesh.http_url}/v1/{path}",
        json={"model": "default", **asked, "max_tokens": 4, "ignore_eos": True},
    )
    assert answer.status_code == 200
    operation = "chat" if "chat" in path else "text_completion"
    expected = {
        ("gateway", f"{operation} {answer.json()['model']}", "SERVER"),
        ("gateway", "plan", "CLIENT"),
        ("master-scheduler", "plan", "SERVER"),
        ("prefill", "prefill", "SERVER"),
        ("decode", "kv.transfer", "CLIENT"),
        ("decode", "decode", "SERVER"),
    }

    def mine() -> list[SeenSpan]:
        request_id = answer.headers["x-request-id"]
        traces = {s.trace_id for s in collector.spans if request_id in str(s.attributes)}
        assert len(traces) <= 1
        return [s for s in collector.spans if s.trace_id in traces]

    await until(lambda: expected <= {(s.service, s.name, s.kind) for s in mine()})
    roots = [s for s in mine() if not s.parent_id]
    assert [s.service for s in roots] == ["gateway"]
    assert "pdmesh" in roots[0].attributes["gen_ai.provider.name"]


@pytest.mark.req("S81")
async def test_the_steps_of_a_plan_are_spans_of_its_trace(
    mesh: Mesh, client: httpx.AsyncClient, collector: OtlpCollector
) -> None:
    """The gateway and the master must record spans for hashing, matching and deciding, with their
    results. The prefill's own span must come from the chosen instance.
    """
    body = {"model": "default", "prompt": prompt_of(450), "max_tokens": 4, "ignore_eos": True}
    asked: list[str] = []

    async def num_cached() -> int:
        asked.append(secrets.token_hex(16))
        headers = {"traceparent": f"00-{asked[-1]}-00f067aa0ba902b7-01"}
        answer = await client.post(f"{mesh.http_url}/v1/completions", json=body, headers=headers)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def is_cached() -> bool:
        return await num_cached() == 448  # 448 tokens are 7 full blocks of 64

    await until(is_cached)

    def found() -> dict[tuple[str, str], SeenSpan]:
        return {(s.service, s.name): s for s in collector.spans if s.trace_id == asked[-1]}

    steps = [
        ("gateway", "plan.hash"),
        ("master-scheduler", "plan.match"),
        ("master-scheduler", "plan.decide"),
        ("prefill", "prefill"),
        ("decode", "decode"),
    ]
    plans = [("gateway", "plan"), ("master-scheduler", "plan")]
    await until(lambda: {*steps, *plans} <= set(found()))
    spans = found()
    hashing, matching, deciding, prefill, _ = (spans[step] for step in steps)
    for before, after in itertools.pairwise((hashing, matching, deciding, prefill)):
        assert before.started_ns <= before.ended_ns <= after.started_ns
    waiting, planning = (spans[plan] for plan in plans)
    assert hashing.parent_id == waiting.span_id
    assert matching.parent_id == deciding.parent_id == planning.span_id
    assert int(planning.attributes["pdmesh.plan.queries"]) >= 1
    assert int(matching.attributes["pdmesh.plan.holders"]) >= 1
    assert deciding.attributes["pdmesh.plan.matched_tokens"] == "448"
    assert deciding.attributes["pdmesh.prefill.id"] == prefill.instance_id
    assert planning.attributes["pdmesh.group.id"]


async def test_every_service_sends_its_metrics_to_the_collector(
    mesh: Mesh, client: httpx.AsyncClient, collector: OtlpCollector
) -> None:
    services = (
        "gateway",
        "master-scheduler",
        "prefill",
        "decode",
        "kv-cache-index",
        "health-monitor",
    )

    def is_ready(service: str) -> bool:
        seen = collector.metrics.get((service, "pdmesh.process.ready"))
        return seen is not None and list(seen.points.values()) == [1]

    await until(lambda: all(map(is_ready, services)))
    await stream_completion(client, mesh.http_url, prompt_of(64), 4, ignore_eos=True)
    await until(lambda: ("gateway", "gen_ai.server.time_per_output_token") in collector.metrics)
    seen = collector.metrics["gateway", "gen_ai.server.time_per_output_token"]
    labels = {key for key, _ in next(iter(seen.points))}
    assert labels == {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
    assert collector.metrics["gateway", "pdmesh.gateway.plans"].kind == "sum"


async def test_a_decode_has_as_many_slots_in_its_record_as_in_its_load(mesh: Mesh) -> None:
    for name, address in (await fleet.addresses(mesh)).items():
        answer = await fleet.status(address)
        assert answer is not None, name
        assert answer.record.num_slots == answer.load.num_slots, name


async def test_operators_see_a_finished_request_as_readable_json(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    bus = await NatsBus.connect(mesh.nats_url, "test-events")
    seen: list[Message] = []

    async def take(message: Message) -> None:
        seen.append(message)

    await bus.subscribe(subjects.request_finished(), take)
    body = {"model": "default", "prompt": prompt_of(130), "max_tokens": 5, "ignore_eos": True}
    answer = await client.post(f"{mesh.http_url}/v1/completions", json=body)
    request_id = answer.headers["x-request-id"]
    await until(lambda: any(request_id in m.data.decode() for m in seen))
    message = next(m for m in seen if request_id in m.data.decode())
    assert message.headers["content-type"] == "application/json"
    assert json.loads(message.data)["requestId"] == request_id
    event = decode_event(message, RequestFinished)
    assert (event.outcome, event.usage.num_completion_tokens) == ("completed", 5)
    assert event.prefill_id.startswith("prefill-")
    assert event.decode_id.startswith("decode-")
    assert 0 < event.ttft_ms <= event.e2e_ms
    await bus.close()


@pytest.mark.req("S37")
@pytest.mark.fault("F39")
async def test_a_constraint_that_allows_no_token_is_at_once_an_error_of_the_client(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    """The gateway must not try any choice elsewhere, because all clients share its budget for
    retries.
    """
    bus = await NatsBus.connect(mesh.nats_url, "test-form")
    seen: list[RequestFinished] = []
    errors: list[Message] = []

    async def take(message: Message) -> None:
        seen.append(decode_event(message, RequestFinished))

    async def take_error(message: Message) -> None:
        errors.append(message)

    await bus.subscribe(subjects.request_finished(), take)
    await bus.subscribe(subjects.error_reported("*"), take_error)
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [0]}
    body = {"model": "default", "prompt": prompt_of(30), "max_tokens": 5, "n": 16, **form}
    for _ in range(3):
        answer = await client.post(f"{mesh.http_url}/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "structured_outputs.choice")
        assert error["code"] == "constraint_unsatisfiable"
    await until(lambda: len(seen) == 3)
    assert [event.num_migrations for event in seen] == [0, 0, 0]
    assert not errors, "it does not count as an instance's failure"
    await bus.close()
    await until(lambda: _nothing_held(mesh))


async def test_no_prompt_or_answer_reaches_a_log_an_event_or_a_span(
    mesh: Mesh, client: httpx.AsyncClient, collector: OtlpCollector
) -> None:
    """Tests the invariant I9. No log, event or span may contain the canary word that clients send,
    or a streamed answer.

    The word is in prompts, in ignored fields, in bad requests, and in the prompt of a stream whose
    client leaves.
    """
    bus = await NatsBus.connect(mesh.nats_url, "test-canary")
    events: list[Message] = []

    async def take(message: Message) -> None:
        events.append(message)

    await bus.subscribe(subjects.ALL, take)
    url = f"{mesh.http_url}/v1/chat/completions"
    good = {"model": "default", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 4}
    assert (await client.post(url, json=good)).status_code == 200
    for ignored in ({**good, "x": CANARY}, {**good, CANARY: 1}):
        assert (await client.post(url, json=ignored)).status_code == 200
    for bad in (
        {**good, "max_tokens": -1},
        {**good, "messages": CANARY},
        {**good, "top_k": CANARY},
    ):
        assert (await client.post(url, json=bad)).status_code == 400
    left = {**good, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    async with client.stream("POST", url, json=left) as response:
        await anext(response.aiter_bytes())
    prompt = prompt_of(130)
    streamed = await stream_completion(client, mesh.http_url, prompt, 40, ignore_eos=True)

    def outcomes() -> list[str]:
        finished = [m for m in events if "request.finished" in m.subject]
        return sorted(decode_event(m, RequestFinished).outcome for m in finished)

    await until(lambda: outcomes() == ["cancelled"] + 4 * ["completed"])
    answer = streamed.text[:24]
    assert len(answer) == 24
    assert len(set(answer)) > 4, "nothing else contains it by chance"
    logs = [path.read_bytes() for path in (mesh.state_dir / "logs").iterdir()]
    places = [*logs, *(m.data for m in events), *collector.bodies]
    assert len(logs) >= 10
    assert not [p for p in places if CANARY.encode() in p or answer.encode() in p]
    await bus.close()


@pytest.mark.req("S138")
async def test_the_numbers_of_a_request_are_in_the_metrics_of_its_instances(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    """Each request must count once in the TTFT, and each token once. Instances must report free
    memory, slots and batches.
    """
    asked, num_tokens, prompt = 6, 9, prompt_of(333)
    prefills, decodes = (("prefill-0", "prefill-1"), ("decode-0", "decode-1"))

    def counted() -> dict[str, float]:
        gateway = {
            "ttft": "gen_ai_server_time_to_first_token_seconds_count",
            "per token": "gen_ai_server_time_per_output_token_seconds_count",
            "whole": "gen_ai_server_request_duration_seconds_count",
        }
        tokens = "pdmesh_gateway_tokens_total"
        found = {name: fleet.counted(mesh, ["gateway-0"], m) for name, m in gateway.items()}
        for way in ("input", "output"):
            found[way] = fleet.counted(mesh, ["gateway-0"], tokens, direction=way)
        return found

    await until(lambda: _nothing_held(mesh))
    before = counted()
    for _ in range(asked):
        outcome = await stream_completion(
            client, mesh.http_url, prompt, num_tokens, ignore_eos=True
        )
        assert outcome.is_complete
    await until(lambda: counted()["whole"] == before["whole"] + asked)
    grown = {name: value - before[name] for name, value in counted().items()}
    assert grown == {
        "ttft": asked,
        "per token": asked,
        "whole": asked,
        "input": asked * len(prompt),
        "output": asked * num_tokens,
    }
    drawn = fleet.counted(mesh, [*prefills, *decodes], "pdmesh_instance_tokens_total")
    assert drawn >= asked * num_tokens
    for name in (*prefills, *decodes):
        seen = {metric: value for metric, _, value in fleet.samples(mesh, name)}
        assert seen["pdmesh_kv_blocks_free"] > 0
        assert seen["pdmesh_slots_used"] == 0
    batches = fleet.counted(mesh, decodes, "pdmesh_instance_batch_size_count")
    assert batches >= num_tokens - 1


@pytest.mark.req("S79")
async def test_running_streams_end_while_no_master_runs(
    mesh: Mesh, client: httpx.AsyncClient, reference: fleet.Reference
) -> None:
    """The master is frozen from the moment when all streams have begun until the last one has
    ended.
    """
    (master,) = (name for name in mesh.names if name.startswith("master"))
    num_tokens, lines = 400, []
    body = {"model": "default", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}

    async def read(prompt: list[int]) -> str:
        text = ""
        url = f"{mesh.http_url}/v1/completions"
        asked = {**body, "prompt": prompt, "temperature": 0}
        async with client.stream("POST", url, json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if text:
                        started.add(prompt[0] + 1000 * len(prompt))
                elif line:
                    lines.append(line)
        return text

    started: set[int] = set()
    prompts = [prompt_of(100 + n) for n in range(8)]
    streams = [asyncio.create_task(read(prompt)) for prompt in prompts]
    await until(lambda: len(started) == len(prompts))
    pid = mesh.pid(master)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not lines, "all streams are under way"
        texts = await asyncio.wait_for(asyncio.gather(*streams), 300)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert texts == [reference.text(prompt, num_tokens) for prompt in prompts]
    assert lines == ["data: [DONE]"] * len(prompts)
    assert mesh.pid(master) == pid, "no other master was started"


async def test_accepted_is_completed_plus_failed_plus_cancelled(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    """Tests the invariant I6 over all requests that the tests above sent to this mesh."""

    def counted() -> tuple[float, float]:
        accepted = ended = 0.0
        for name, _, value in fleet.samples(mesh, "gateway-0"):
            accepted += value if name == "pdmesh_requests_accepted_total" else 0
            ended += value if name == "pdmesh_requests_total" else 0
        return accepted, ended

    await stream_completion(client, mesh.http_url, prompt_of(3), 2)
    await until(lambda: counted()[0] == counted()[1])
    assert counted()[0] > len(LENGTHS)


async def _nothing_held(mesh: Mesh) -> bool:
    return not await fleet.held(mesh)
