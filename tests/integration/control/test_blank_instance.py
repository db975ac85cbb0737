"""Lets blank instances, processes without a role, follow the leader's assignments over a real NATS.
Assignments give a process a role, make it serve and drain, and make it blank again.
"""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson

from pdmesh.core.instance.lifecycle_events import Ignored
from pdmesh.engine.base import Sampling
from pdmesh.events.v1.events_pb2 import InstanceHealth, KvBlocks
from pdmesh.instance.incarnation import artefact
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.buckets import ASSIGNMENTS
from pdmesh.net.nats.kv_bucket import KvBucket
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_BLANK,
    INSTANCE_PHASE_CONNECTED,
    INSTANCE_PHASE_CONNECTING,
    INSTANCE_PHASE_DRAINED,
    INSTANCE_PHASE_DRAINING,
    INSTANCE_PHASE_FAILED,
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_NONE,
    ROLE_PREFILL,
)
from pdmesh.v1.groups_pb2 import (
    STAGE_BLANK,
    STAGE_CONNECT,
    STAGE_DRAIN,
    STAGE_SERVE,
    Assignment,
)
from tests.fakes.sim_instances import TestSession, generate
from tests.support.sim_reference import sim_reference
from tests.support.sites.instance_site import Process, Site, site
from tests.support.sites.lone_master import (
    OPTIONS,
    Master,
    again,
    blank,
)

__all__ = ["site"]  # pytest finds the fixture under this name

PROMPT: list[int] = np.random.default_rng(3).integers(3, 600, 150).tolist()
SHORT = Sampling(max_tokens=20, ignore_eos=True)


@pytest.fixture
async def master(site: Site) -> AsyncIterator[Master]:
    book = await NatsAssignments(site.bus).book()
    yield Master(site.view, book)
    await book.close()


def gauge(process: Process, name: str) -> float | None:
    lines = [x for x in process.metrics().splitlines() if x.startswith((f"{name} ", f"{name}{{"))]
    return float(lines[0].rpartition(" ")[2]) if lines else None


@pytest.mark.req("S14", "S16", "S18", "S19", "S23")
async def test_the_same_process_is_a_prefill_in_one_run_and_a_decode_in_the_next(
    site: Site, master: Master
) -> None:
    a, b = await asyncio.gather(blank(site, "i-0"), blank(site, "i-1"))
    assert (a.record.role, a.record.grpc_address) == (ROLE_NONE, "")
    pids = a.child.pid, b.child.pid
    seen: list[int] = []
    for prefill, decode in ((a, b), (b, a)):
        names = prefill.record.instance_id, decode.record.instance_id
        await master.set_up(*names)
        p, d = again(site, prefill), again(site, decode)
        assert (p.record.role, d.record.role) == (ROLE_PREFILL, ROLE_DECODE)
        assert (p.record.num_slots, p.record.model, p.record.revision) == (4, "tiny", "r1")
        assert [peer.instance_id for peer in d.record.verified_peers] == [names[0]]
        assert len(d.record.kv_addresses) == 1
        assert not p.record.verified_peers
        assert d.record.load_timings.build_ms >= 0
        assert gauge(d, "pdmesh_slots") == 6  # two of these slots are for waiting requests
        async with TestSession(p) as to_p, TestSession(d) as to_d:
            assert await generate(to_p, to_d, PROMPT, SHORT) == sim_reference(PROMPT, SHORT)
        seen += [p.record.incarnation, d.record.incarnation]
        for name in names:
            await master.erase(name)
        assert again(site, prefill).record.role == ROLE_NONE
        assert gauge(prefill, "pdmesh_slots") is None
    assert len(set(seen)) == 4
    assert (a.child.pid, b.child.pid) == pids
    assert {site.view.records[n].pid for n in ("i-0", "i-1")} == set(pids)


@pytest.mark.req("S22", "S36")
@pytest.mark.fault("F41")
async def test_a_drain_cuts_no_request_and_the_next_stage_erases_everything(
    site: Site, master: Master
) -> None:
    """One request still runs, and one prompt's KV still waits for its decode. Both must complete
    before the instance counts as drained.
    """
    p, d = await asyncio.gather(blank(site, "p"), blank(site, "d"))
    await master.assign("p", ROLE_PREFILL, engine_options=OPTIONS)
    await master.assign("d", ROLE_DECODE, engine_options={**OPTIONS, "sim_law": "demo"})
    for name in ("p", "d"):
        await master.until(name, INSTANCE_PHASE_LOADED)
        peers = [master.peer("p")] if name == "d" else []
        await master.stage(name, STAGE_SERVE, peers)
        await master.until(name, INSTANCE_PHASE_READY)
    blocks: list[KvBlocks] = []

    async def on_blocks(message: Message) -> None:
        blocks.append(decode_event(message, KvBlocks))

    await site.bus.subscribe(subjects.kv_blocks("p"), on_blocks)
    p, d = again(site, p), again(site, d)
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        first = await (await to_p.prefill(PROMPT, SHORT)).until("first_token")
        await master.stage("p", STAGE_DRAIN)
        await master.until("p", INSTANCE_PHASE_DRAINING)
        late = await to_p.prefill(PROMPT, SHORT)
        assert (await late.until("rejected")).reason == 4  # REJECT_REASON_DRAINING
        assert master.record("p").is_draining
        rest = await to_d.start(PROMPT, SHORT, first.token_id, first.ticket)
        await rest.until("token")
        await master.until("p", INSTANCE_PHASE_DRAINED)
        await master.stage("d", STAGE_DRAIN)
        await rest.until("finished")
        assert [first.token_id, *rest.tokens] == sim_reference(PROMPT, SHORT)[0]
        await master.until("d", INSTANCE_PHASE_DRAINED)
    await site.until(lambda: any(event.stored for event in blocks))
    await master.stage("p", STAGE_BLANK)
    await master.until("p", INSTANCE_PHASE_BLANK)
    await site.until(lambda: blocks[-1].is_cleared)
    stored: set[bytes] = set()
    for event in blocks:
        stored = (set() if event.is_cleared else stored - set(event.removed)) | set(event.stored)
    assert not stored


@pytest.mark.fault("F5", "F12", "F13")
async def test_outdated_assignments_are_ignored(site: Site, master: Master) -> None:
    """The instance ignores a former leader's assignment, an assignment to an earlier incarnation of
    itself, and an assignment for a role that it does not have.
    """
    p = await blank(site, "p")
    master.epoch = 5
    await master.assign("p", ROLE_PREFILL, incarnation=p.record.incarnation + 1)
    await master.assign("p", ROLE_PREFILL)
    await master.until("p", INSTANCE_PHASE_LOADED)
    await master.stage("p", STAGE_SERVE)
    await master.until("p", INSTANCE_PHASE_READY)
    loaded = master.record("p").incarnation
    await master.assign("p", ROLE_DECODE, assignment_id=2, stage=STAGE_SERVE)
    await site.until(lambda: Ignored.OTHER_ROLE.value in p.log_file.read_text())
    raw = KvBucket(
        site.bus,
        ASSIGNMENTS,
        # Write like a former leader. The store itself would compare revisions and refuse.
    )
    old = Assignment()
    old.CopyFrom(master.given["p"])
    assert master.record("p").epoch == 5, "a leader with a lower epoch learns of this one (F21)"
    old.epoch, old.assignment_id, old.stage = 4, 9, STAGE_BLANK
    await raw.put("p", MessageToJson(old).encode())
    await site.until(lambda: Ignored.OLDER.value in p.log_file.read_text())
    await raw.put("p", b"no assignment")
    await site.until(lambda: "assignments.bad_value" in p.log_file.read_text())
    record = master.record("p")
    assert (record.phase, record.role, record.incarnation) == (
        INSTANCE_PHASE_READY,
        ROLE_PREFILL,
        loaded,
    )


@pytest.mark.req("S16", "S25", "S26")
@pytest.mark.fault("F23")
async def test_a_pair_that_cannot_connect_is_named_and_joins_when_it_can(
    site: Site, master: Master
) -> None:
    _, q, d = await asyncio.gather(*(blank(site, name) for name in ("p", "q", "d")))
    for name, role in (("p", ROLE_PREFILL), ("q", ROLE_PREFILL), ("d", ROLE_DECODE)):
        await master.assign(name, role)
    for name in ("p", "q", "d"):
        await master.until(name, INSTANCE_PHASE_LOADED)
    stale = master.peer("q", incarnation=master.record("q").incarnation + 1)
    await master.stage("d", STAGE_CONNECT, [master.peer("p"), stale, master.peer("d")])
    await site.until(lambda: len(master.record("d").failed_peers) == 1)
    record = master.record("d")
    assert record.phase == INSTANCE_PHASE_CONNECTING
    assert [x.incarnation for x in record.failed_peers] == [stale.incarnation]
    await site.until(lambda: [x.instance_id for x in master.record("d").verified_peers] == ["p"])
    assert "KV_REFUSED_WRONG_INCARNATION" in d.log_file.read_text()
    await master.stage("d", STAGE_CONNECT, [master.peer("p"), master.peer("q")])
    await master.until("d", INSTANCE_PHASE_CONNECTED)
    assert not master.record("d").failed_peers
    for name in ("d", "p", "q"):
        await master.stage(name, STAGE_SERVE)
        await master.until(name, INSTANCE_PHASE_READY)
    await master.stage("d", STAGE_SERVE, [master.peer("q")])
    await site.until(lambda: [x.instance_id for x in master.record("d").verified_peers] == ["q"])
    async with TestSession(again(site, q)) as to_q, TestSession(again(site, d)) as to_d:
        assert await generate(to_q, to_d, PROMPT, SHORT) == sim_reference(PROMPT, SHORT)
    assert "verified" in d.metrics()


def artefact_for(folder: Path, role: str, **config: str) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "weights.bin").write_bytes(bytes(range(256)) * 64)
    (model / "config.json").write_text("{}")
    return artefact.build(model, role, folder / role, config=config)  # type: ignore[arg-type]


@pytest.mark.req("S17", "S20")
async def test_only_the_artefact_of_the_role_is_loaded_and_only_if_it_is_whole(
    site: Site, master: Master, tmp_path: Path
) -> None:
    manifest = artefact_for(tmp_path, "prefill", sim_law="zero", num_slots="3")
    cache = tmp_path / "cache"
    await blank(site, "p", MODEL_CACHE_DIR=str(cache))
    await master.assign("p", ROLE_DECODE, manifest=str(manifest))
    failed = await master.until("p", INSTANCE_PHASE_FAILED)
    assert failed.failure.startswith("WRONG_ROLE: ")
    weights = manifest.parent / "files" / "weights.bin"
    whole = weights.read_bytes()
    # The file is a hard link to the model's own file, so it must not be changed in place.
    weights.unlink()
    weights.write_bytes(whole[:-1] + b"?")
    await master.begin_anew("p")
    await master.assign("p", ROLE_PREFILL, manifest=str(manifest))
    failed = await master.until("p", INSTANCE_PHASE_FAILED)
    assert failed.failure.startswith("WRONG_HASH: ")
    assert "weights.bin" in failed.failure
    await master.begin_anew("p")
    await master.assign("p", ROLE_PREFILL, engine_options={"nats_url": "nats://elsewhere"})
    assert (await master.until("p", INSTANCE_PHASE_FAILED)).failure.startswith("BAD_OPTION: nats_")
    await master.begin_anew("p")
    weights.write_bytes(whole)  # the copy in the instance's cache is still damaged
    await master.assign(
        "p", ROLE_PREFILL, manifest=str(manifest), model="", engine_options={"num_slots": "5"}
    )
    loaded = await master.until("p", INSTANCE_PHASE_LOADED)
    assert (loaded.model, loaded.num_slots, loaded.failure) == ("model", 5, "")
    await master.stage("p", STAGE_SERVE)
    await master.until("p", INSTANCE_PHASE_READY)
    with urllib.request.urlopen(f"http://{loaded.ops_address}/metrics", timeout=60) as response:
        text = str(response.read(), "utf-8")
    for part in ("fetch", "verify", "build"):
        assert f'pdmesh_instance_load_seconds{{part="{part}"}}' in text


@pytest.mark.req("S18")
async def test_health_is_reported_at_once_and_fixed_roles_follow_assignments_too(
    site: Site, master: Master
) -> None:
    beats: list[InstanceHealth] = []

    async def on_beat(message: Message) -> None:
        beats.append(decode_event(message, InstanceHealth))

    await site.bus.subscribe(subjects.health_instance("d"), on_beat)
    d = await site.start("decode", "d", SIM_LAW="zero", SCENARIO="default", GROUP_ID="g0")
    assert (d.record.phase, d.record.assignment_id) == (INSTANCE_PHASE_READY, 0)
    await site.until(lambda: len(beats) >= 1)
    await master.assign("d", ROLE_DECODE, stage=STAGE_SERVE, model="as the master calls it")
    await site.until(lambda: master.record("d").assignment_id == 1)
    assert master.record("d").phase == INSTANCE_PHASE_READY
    await master.erase("d")
    assert master.record("d").role == ROLE_NONE
    assert d.child.returncode is None


@pytest.mark.req("S23", "S35", "S36")
@pytest.mark.fault("F1", "F5", "F37")
async def test_a_killed_process_comes_back_blank_and_ignores_its_old_assignment(
    site: Site, master: Master
) -> None:
    old, d = await asyncio.gather(blank(site, "p"), blank(site, "d"))
    await master.set_up("p", "d")
    old.signal(signal.SIGKILL)
    await old.exit_code()
    new = await blank(site, "p")
    assert new.record.incarnation != old.record.incarnation
    # This assignment is still for the old incarnation.
    await master.stage("p", STAGE_SERVE, [master.peer("d")])
    await master.assign("p", ROLE_PREFILL, assignment_id=2)
    await master.until("p", INSTANCE_PHASE_LOADED)
    await master.stage("d", STAGE_SERVE, [master.peer("p")])
    await site.until(
        lambda: (
            [x.incarnation for x in master.record("d").verified_peers] == [new.record.incarnation]
        )
    )
    await master.stage("p", STAGE_SERVE)
    await master.until("p", INSTANCE_PHASE_READY)
    async with TestSession(again(site, new)) as to_p, TestSession(again(site, d)) as to_d:
        assert await generate(to_p, to_d, PROMPT, SHORT) == sim_reference(PROMPT, SHORT)


@pytest.mark.req("S10")
@pytest.mark.fault("F18", "F21")
async def test_without_nats_an_instance_continues_and_registers_again_in_an_empty_one(
    site: Site, master: Master
) -> None:
    p, d = await asyncio.gather(blank(site, "p"), blank(site, "d"))
    await master.set_up("p", "d")
    incarnations = {name: master.record(name).incarnation for name in ("p", "d")}
    p, d = again(site, p), again(site, d)
    site.server.kill()
    async with TestSession(p) as to_p, TestSession(d) as to_d:
        assert await generate(to_p, to_d, PROMPT, SHORT) == sim_reference(PROMPT, SHORT)
        site.server.wipe()
        await site.server.start()
        await site.until(lambda: site.view.is_connected)
        assert await generate(to_p, to_d, PROMPT, SHORT) == sim_reference(PROMPT, SHORT)
    for name, incarnation in incarnations.items():
        await master.until(name, INSTANCE_PHASE_READY)
        assert master.record(name).incarnation == incarnation
    await site.until(lambda: master.book.is_current)
    await master.erase("p")


def held(process: Process) -> tuple[int, int]:
    """The numbers of open files and of threads."""
    folder = Path(f"/proc/{process.child.pid}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))


@pytest.mark.req("S22", "S36")
async def test_incarnations_leave_nothing_behind_in_their_process(
    site: Site, master: Master
) -> None:
    """The process lives five incarnations, one after another. Each has a host pool, arenas, sockets
    and threads. The fifth must hold no more of them than the second did.
    """
    process = await blank(site, "i-0", KV_HOST_POOL_BYTES=str(32 << 20))
    left: list[tuple[int, int]] = []
    for n in range(5):
        role = (ROLE_PREFILL, ROLE_DECODE)[n % 2]
        await master.assign("i-0", role, assignment_id=n + 1)
        await master.until("i-0", INSTANCE_PHASE_LOADED)
        await master.stage("i-0", STAGE_SERVE)
        await master.until("i-0", INSTANCE_PHASE_READY)
        if role == ROLE_PREFILL:
            async with TestSession(again(site, process)) as to_p:
                leg = await to_p.prefill(PROMPT, Sampling(max_tokens=1))
                await leg.until("first_token")
        await master.erase("i-0")
        left.append(held(process))
    files, threads = zip(*left, strict=True)
    assert files[4] <= files[1] + 2, left
    assert threads[4] <= threads[1] + 2, left
