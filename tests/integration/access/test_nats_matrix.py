"""Lets every role try every subject, bucket and command of NATS, and compares the result with the
lists in this file.

The lists are written by hand and not taken from `pdmesh.server_permissions`. So a mistake there
does not repeat itself here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import APIError

from pdmesh.errors import Unavailable
from pdmesh.net import subjects
from pdmesh.net.nats.buckets import ALL_BUCKETS, INSTANCES, LEADER
from pdmesh.server_permissions.nats_accounts import Holder
from tests.integration.access.sites import (
    LEASE_S,
    PROCESSES,
    RoleClient,
    bucket,
    bus_of,
    connected,
    make_buckets,
    nats_with,
)
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.servers import TestServer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ME: Final = "{me}"
WHOLE: Final = ">"

# Each event has the form `domain.message.about`.
EVENTS: Final = {
    "gateway": "health.instance.{me} request.finished.{me}",
    "master-scheduler": "health.instance.{me} control.leader.{me} control.audit.{me} kv.pin.* "
    "group.changed.* group.step.* group.upgrade.*",
    "kv-cache-index": "health.instance.{me}",
    "health-monitor": "health.instance.{me} health.changed.* health.fault.*",
    "node-agent": "health.instance.{me} health.node.*",
    "prefill": "health.instance.{me} kv.blocks.{me} load.instance.{me} error.reported.{me}",
    "decode": "health.instance.{me} kv.blocks.{me} load.instance.{me} error.reported.{me}",
    "instance": "health.instance.{me} kv.blocks.{me} load.instance.{me} error.reported.{me}",
    "operator": "",
}
HEARS: Final = {
    "master-scheduler": "kv.blocks.* load.instance.* request.finished.* error.reported.* "
    "health.changed.* health.fault.* group.step.* group.upgrade.* control.leader.* control.audit.*",
    "kv-cache-index": "kv.blocks.*",
    "health-monitor": "health.instance.* health.node.*",
}
# Each entry has the form `bucket/key`. The names of the buckets omit their common `pdmesh-`.
MASTERS_BUCKETS: Final = "assignments pins adapters out-of-service desired leader usage"
WRITES: Final = {
    "gateway": "instances/{me} tenants/*",
    "master-scheduler": "instances/{me} "
    + " ".join(f"{name}/*" for name in MASTERS_BUCKETS.split()),
    "kv-cache-index": "instances/{me}",
    "health-monitor": "instances/{me} health/* faults/*",
    "node-agent": "instances/{me}",
    "prefill": "instances/{me}",
    "decode": "instances/{me}",
    "instance": "instances/{me}",
    "operator": "",
}
ALL: Final = " ".join(f"{name.removeprefix('pdmesh-')}/>" for name in ALL_BUCKETS)
INSTANCES_FOLLOW: Final = "instances/> faults/> pins/> adapters/> assignments/{me}"
FOLLOWS: Final = {
    "gateway": "instances/> out-of-service/> faults/> adapters/> tenants/> desired/current "
    "desired/upgrades",
    "master-scheduler": ALL,
    "kv-cache-index": "instances/> pins/>",
    "health-monitor": "instances/> health/> faults/> out-of-service/>",
    "node-agent": "instances/>",
    "prefill": INSTANCES_FOLLOW,
    "decode": INSTANCES_FOLLOW,
    "instance": INSTANCES_FOLLOW,
    "operator": ALL,
}
READS: Final = {"gateway": "instances tenants", "master-scheduler": ALL.replace("/>", "")}
KEYS: Final = (WHOLE, "current", "adjusted", "upgrades", "prefill-0", "prefill-1", "master-0", "x")

# The headers by which a writer could change an entry of another writer.
HEADERS: Final[tuple[dict[str, str], ...]] = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"KV-Operation": "PURGE", "Nats-Rollup": "all"},
    {"KV-Operation": "PURGE"},
    {"KV-Operation": "DEL"},
    {"Nats-Marker-Reason": "Purge"},
    {"Nats-TTL": "1s"},
    {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-Expected-Last-Subject-Sequence-Subject": ""},
    {"Nats-Incr": "1"},
    {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": ""},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
)

STREAM_COMMANDS: Final = (
    "STREAM.CREATE.{s}", "STREAM.UPDATE.{s}", "STREAM.DELETE.{s}", "STREAM.PURGE.{s}",
    "STREAM.INFO.{s}", "STREAM.MSG.GET.{s}", "STREAM.MSG.DELETE.{s}", "STREAM.SNAPSHOT.{s}",
    "STREAM.RESTORE.{s}", "STREAM.LEADER.STEPDOWN.{s}", "STREAM.PEER.REMOVE.{s}",
    "CONSUMER.CREATE.{s}", "CONSUMER.CREATE.{s}.c", "CONSUMER.DURABLE.CREATE.{s}.c",
    "CONSUMER.NAMES.{s}", "CONSUMER.LIST.{s}", "CONSUMER.INFO.{s}.c", "CONSUMER.DELETE.{s}.c",
    "CONSUMER.MSG.NEXT.{s}.c", "CONSUMER.PAUSE.{s}.c", "CONSUMER.UNPIN.{s}.c",
    "CONSUMER.RESET.{s}.c", "CONSUMER.LEADER.STEPDOWN.{s}.c", "DIRECT.GET.{s}",
)  # fmt: skip
ACCOUNT_COMMANDS: Final = (
    "INFO", "STREAM.NAMES", "STREAM.LIST", "STREAM.TEMPLATE.CREATE.t", "META.LEADER.STEPDOWN",
    "SERVER.REMOVE", "ACCOUNT.PURGE.pdmesh",
)  # fmt: skip


def words(table: dict[str, str], role: str, me: str) -> set[str]:
    return set(table.get(role, "").replace(ME, me).split())


def event_kinds() -> list[str]:
    """The `domain.message` of every event."""
    made = [
        f("*") for _, f in inspect.getmembers(subjects, inspect.isfunction) if f.__name__[0] != "_"
    ]
    return sorted(each.removeprefix("mesh.v1.").removesuffix(".*") for each in made)


def entries(table: dict[str, str], role: str, me: str) -> set[tuple[str, str]]:
    found = (word.partition("/") for word in words(table, role, me))
    return {(f"pdmesh-{name}", key) for name, _, key in found}


def all_sends() -> set[str]:
    """Every subject on which a message could have an effect, whoever may send it."""
    ids = [instance_id for _, instance_id in PROCESSES]
    sends = {f"mesh.v1.{kind}.{each}" for kind in event_kinds() for each in (*ids, "x")}
    for name in ALL_BUCKETS:
        stream = f"KV_{name}"
        sends |= {f"$KV.{name}.{key}" for key in (*ids, *KEYS) if key != WHOLE}
        commands = [command.format(s=stream) for command in STREAM_COMMANDS]
        commands += [f"CONSUMER.CREATE.{stream}.c.$KV.{name}.{key}" for key in (*ids, *KEYS)]
        commands += [f"DIRECT.GET.{stream}.$KV.{name}.{key}" for key in KEYS]
        sends |= {f"{p}.{c}" for p in ("$JS.API", "$PDMESH.API") for c in commands}
    sends |= {f"{p}.{c}" for p in ("$JS.API", "$PDMESH.API") for c in ACCOUNT_COMMANDS}
    sends |= {f"_INBOX.{role}.{instance_id}.a" for role, instance_id in PROCESSES}
    return sends | {"$SYS.REQ.SERVER.PING", "$JS.ACK.KV_pdmesh-desired.c.1.1.1.1.0", "any.thing"}


def expected_sends(role: str, me: str) -> set[str]:
    ids = [instance_id for _, instance_id in PROCESSES]
    sends = {f"_INBOX.{role}.{me}.a"}
    for word in words(EVENTS, role, me):
        kind, _, about = word.rpartition(".")
        sends |= {f"mesh.v1.{kind}.{each}" for each in ((*ids, "x") if about == "*" else (about,))}
    for name, key in entries(WRITES, role, me):
        every = {*ids, *KEYS} - {WHOLE}
        sends |= {f"$KV.{name}.{each}" for each in (every if key == "*" else {key})}
    api_of = "$PDMESH.API"
    for name, key in entries(FOLLOWS, role, me):
        stream = f"KV_{name}"
        filters = {*ids, *KEYS} if key == WHOLE else {key}
        sends |= {f"{api_of}.CONSUMER.CREATE.{stream}.c.$KV.{name}.{each}" for each in filters}
        sends.add(f"{api_of}.CONSUMER.DELETE.{stream}.c")
    reads = words(READS, role, me) or {"instances"}
    sends |= {f"{api_of}.STREAM.MSG.GET.KV_pdmesh-{name}" for name in reads}
    if role == "operator":
        sends |= {f"{api_of}.STREAM.INFO.KV_{name}" for name in ALL_BUCKETS}
    if role == "master-scheduler":
        made = [f"{verb}.KV_{name}" for verb in ("CREATE", "UPDATE") for name in ALL_BUCKETS]
        sends |= {f"{api_of}.STREAM.{each}" for each in made}
    return sends


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nats(
    tmp_path_factory: pytest.TempPathFactory, ours: TestAuthority
) -> AsyncIterator[TestServer]:
    directory = tmp_path_factory.mktemp("servers")
    async with nats_with(directory, ours, [Holder(*each) for each in PROCESSES]) as server:
        async with bus_of(server, ours, "master-scheduler", "master-0") as bus:
            await make_buckets(bus)
        yield server


@pytest.mark.parametrize(("role", "me"), PROCESSES)
async def test_a_role_sends_what_is_its_own_and_nothing_else(
    nats: TestServer, ours: TestAuthority, role: str, me: str
) -> None:
    async with connected(nats, ours, role, me) as caller:
        assert await caller.allowed_to_send(all_sends()) == expected_sends(role, me)


@pytest.mark.parametrize(("role", "me"), PROCESSES)
async def test_a_role_hears_what_it_needs_and_nobody_elses_answers(
    nats: TestServer, ours: TestAuthority, role: str, me: str
) -> None:
    own = f"_INBOX.{role}.{me}.>"
    tried = {f"mesh.v1.{kind}.*" for kind in event_kinds()}
    tried |= {f"_INBOX.{role}.{instance_id}.>" for role, instance_id in PROCESSES}
    tried |= {">", "mesh.v1.>", "_INBOX.>", "$KV.>", "$JS.>", "$SYS.>", "$PDMESH.>", "any.thing"}
    heard = {f"mesh.v1.{each}" for each in words(HEARS, role, me)}
    if role == "operator":
        heard = {"mesh.v1.>", *(f"mesh.v1.{kind}.*" for kind in event_kinds())}
    async with connected(nats, ours, role, me) as caller:
        assert await caller.allowed_to_hear(tried) == {own, *heard}


async def test_events_arrive_at_those_who_hear_them(nats: TestServer, ours: TestAuthority) -> None:
    """Each process has a NATS account of its own. Events reach other accounts because each kind of
    event is exported to them.
    """
    got: dict[str, set[str]] = {}
    async with connected(nats, ours, "operator", "ann") as ann:
        for role, me in PROCESSES:
            async with connected(nats, ours, role, me) as listener:
                for kind in words(HEARS, role, me):
                    heard = got.setdefault(f"{role} {kind}", set())

                    async def on_event(msg: object, heard: set[str] = heard) -> None:
                        heard.add(msg.subject)  # type: ignore[attr-defined]

                    await listener.client.subscribe(f"mesh.v1.{kind}", cb=on_event)
                await listener.client.flush(timeout=60)
                seen: set[str] = set()

                async def on_seen(msg: object, seen: set[str] = seen) -> None:
                    seen.add(msg.subject)  # type: ignore[attr-defined]

                subscription = await ann.client.subscribe("mesh.v1.>", cb=on_seen)
                await ann.client.flush(timeout=60)
                sent = await _everybody_tells(nats, ours, me)
                await until(lambda seen=seen, sent=sent: seen >= sent)
                for kind in words(HEARS, role, me):
                    prefix = f"mesh.v1.{kind}".removesuffix("*")
                    wanted = {each for each in sent if each.startswith(prefix)}
                    heard = got[f"{role} {kind}"]
                    await until(lambda h=heard, w=wanted: h >= w)
                await subscription.unsubscribe()


async def _everybody_tells(nats: TestServer, ours: TestAuthority, about: str) -> set[str]:
    """From each process, send each kind of event that the process may send. Returns the
    subjects.
    """
    sent: set[str] = set()
    for role, me in PROCESSES:
        async with connected(nats, ours, role, me) as caller:
            for word in words(EVENTS, role, me):
                subject = f"mesh.v1.{word.replace('*', about)}"
                await caller.client.publish(subject, b"{}")
                sent.add(subject)
            await caller.client.flush(timeout=60)
    return sent


async def test_an_answer_never_lands_where_the_caller_may_not_write(
    nats: TestServer, ours: TestAuthority
) -> None:
    """NATS does not check to which subject it sends an answer.

    When all roles had one account, a caller could name the desired state's entry as that subject.
    NATS then wrote its answer `{"stream": ..., "seq": 2}` over the desired state, and masters read
    the answer as a desired state without groups.
    """
    victims = ("$KV.pdmesh-desired.current", "$KV.pdmesh-instances.decode-0")
    async with bus_of(nats, ours, "master-scheduler", "master-0") as master:
        desired, records = bucket(master, "pdmesh-desired"), bucket(master, INSTANCES)
        await desired.put("current", b"groups")
        async with bus_of(nats, ours, "decode", "decode-0") as decode:
            await bucket(decode, INSTANCES).put("decode-0", b"record")
        async with connected(nats, ours, "prefill", "prefill-0") as caller:
            last = {"last_by_subj": "$KV.pdmesh-instances.prefill-0"}
            asked = (
                ("$KV.pdmesh-instances.prefill-0", b"mine"),
                ("$PDMESH.API.STREAM.MSG.GET.KV_pdmesh-instances", json.dumps(last).encode()),
                ("$PDMESH.API.CONSUMER.DELETE.KV_pdmesh-instances.c", b""),
            )
            for victim in victims:
                for subject, body in asked:
                    await caller.client.publish(subject, body, reply=victim)
            # NATS answers in order. Once this answer has come, NATS has handled the earlier
            # requests.
            await caller.jetstream.publish("$KV.pdmesh-instances.prefill-0", b"done")
        current, record = await desired.get("current"), await records.get("decode-0")
        assert current is not None
        assert current.value == b"groups"
        assert record is not None
        assert record.value == b"record"


async def test_a_consumer_shows_no_more_than_its_subject_says_and_delivers_to_nobody_else(
    nats: TestServer, ours: TestAuthority
) -> None:
    async with bus_of(nats, ours, "master-scheduler", "master-0") as master:
        await bucket(master, "pdmesh-assignments").put("decode-0", b"another's")
        await bucket(master, "pdmesh-desired").put("current", b"groups")
    async with connected(nats, ours, "prefill", "prefill-0") as caller:
        inbox = caller.client.new_inbox()
        got: list[str] = []

        async def on_message(msg: object) -> None:
            got.append(msg.subject)  # type: ignore[attr-defined]

        await caller.client.subscribe(inbox, cb=on_message)
        own = "$KV.pdmesh-assignments.prefill-0"
        subject = f"$PDMESH.API.CONSUMER.CREATE.KV_pdmesh-assignments.c1.{own}"
        for filters in (
            {"filter_subject": "$KV.pdmesh-assignments.decode-0"},
            {"filter_subject": "$KV.pdmesh-assignments.>"},
            {"filter_subjects": ["$KV.pdmesh-assignments.>"]},
            {},
        ):
            config = {"name": "c1", "deliver_subject": inbox, "ack_policy": "none", **filters}
            request = {"stream_name": "KV_pdmesh-assignments", "config": config}
            answer = await caller.client.request(subject, json.dumps(request).encode(), timeout=30)
            assert "error" in json.loads(answer.data), filters
        # NATS delivers to any subject that a consumer names, so a consumer may only name a subject
        # to which no process listens.
        await _deliver_to(caller, "_INBOX.decode.decode-0.a")
        await _deliver_to(caller, "$KV.pdmesh-desired.current")
        await _deliver_to(caller, "$JS.API.STREAM.PURGE.KV_pdmesh-desired")
        assert got == []
    async with bus_of(nats, ours, "master-scheduler", "master-0") as master:
        current = await bucket(master, "pdmesh-desired").get("current")
        assert current is not None
        assert current.value == b"groups"


async def _deliver_to(caller: object, deliver_subject: str) -> None:
    config = api.ConsumerConfig(
        name="thrown",
        deliver_subject=deliver_subject,
        deliver_policy=api.DeliverPolicy.ALL,
        ack_policy=api.AckPolicy.NONE,
        filter_subject="$KV.pdmesh-instances.prefill-0",
    )
    jetstream = caller.jetstream  # type: ignore[attr-defined]
    await jetstream.publish("$KV.pdmesh-instances.prefill-0", b"{}")
    await jetstream.add_consumer("KV_pdmesh-instances", config=config)
    await jetstream.publish("$KV.pdmesh-instances.prefill-0", b"{}")
    await jetstream.delete_consumer("KV_pdmesh-instances", "thrown")


@pytest.mark.parametrize(("role", "me"), [p for p in PROCESSES if p[0] != "operator"])
async def test_no_header_of_a_write_touches_another_entry(
    nats: TestServer, ours: TestAuthority, role: str, me: str
) -> None:
    """`Nats-Rollup: all` removes all other entries of a stream that allows the header. NATS does
    not report the removal to those who follow the stream. Only the bucket of the leadership allows
    the header, and only masters write to that bucket.
    """
    another = ("decode", "decode-0") if role != "decode" else ("gateway", "gateway-0")
    async with (
        bus_of(nats, ours, "master-scheduler", "master-0") as master,
        connected(nats, ours, *another) as other,
        connected(nats, ours, role, me) as caller,
    ):
        for name, key in sorted(entries(WRITES, role, me)):
            if name == LEADER:
                continue
            own, theirs = me if key == "*" else key, another[1]
            writer = other if name == INSTANCES else caller
            await writer.jetstream.publish(f"$KV.{name}.{theirs}", b"theirs")
            held = await bucket(master, name).get(theirs)
            assert held is not None
            for headers in HEADERS:
                sent = {h: value or f"$KV.{name}.{theirs}" for h, value in headers.items()}
                taken = await _is_taken(caller, f"$KV.{name}.{own}", sent)
                assert not (taken and "Nats-Rollup" in sent), f"{name} takes {sent}"
                assert await bucket(master, name).get(theirs) == held, f"{name}: {sent}"


async def _is_taken(caller: RoleClient, subject: str, headers: dict[str, str]) -> bool:
    try:
        await caller.jetstream.publish(subject, b"mine", headers=headers)
    except APIError:
        return False
    return True


async def test_a_bucket_of_an_older_pdmesh_loses_the_header_that_empties_it(
    tmp_path: Path, ours: TestAuthority
) -> None:
    """In older versions the server marked the ends of leases in this bucket, and therefore allowed
    `Nats-Rollup`.
    """
    holders = [Holder("master-scheduler", "m"), Holder("prefill", "p"), Holder("decode", "d")]
    async with (
        nats_with(tmp_path, ours, holders) as server,
        bus_of(server, ours, "master-scheduler", "m") as master,
        connected(server, ours, "prefill", "p") as caller,
        connected(server, ours, "decode", "d") as other,
    ):
        old = api.StreamConfig(
            name=f"KV_{INSTANCES}", subjects=[f"$KV.{INSTANCES}.>"], max_msgs_per_subject=1,
            max_age=LEASE_S, allow_msg_ttl=True, subject_delete_marker_ttl=LEASE_S,
            deny_delete=True, allow_direct=True, discard=api.DiscardPolicy.NEW,
        )  # fmt: skip
        await master.jetstream(20).add_stream(old)
        own, wipe = f"$KV.{INSTANCES}.p", {"Nats-Rollup": "all"}
        await other.jetstream.publish(f"$KV.{INSTANCES}.d", b"theirs")
        assert await _is_taken(caller, own, wipe)
        assert await bucket(master, INSTANCES).get("d") is None, "the attack is real"

        await other.jetstream.publish(f"$KV.{INSTANCES}.d", b"theirs")
        master.num_replicas = 1  # services tell `NatsBus.connect` this number
        await bucket(master, INSTANCES).ensure()
        assert not await _is_taken(caller, own, wipe)
        assert await bucket(master, INSTANCES).get("d") is not None


async def test_only_masters_make_buckets_and_others_wait_for_them(
    tmp_path: Path, ours: TestAuthority
) -> None:
    holders = [Holder("master-scheduler", "m"), Holder("gateway", "g")]
    async with (
        nats_with(tmp_path, ours, holders) as server,
        bus_of(server, ours, "gateway", "g") as gateway,
        bus_of(server, ours, "master-scheduler", "m") as master,
    ):
        records = bucket(gateway, INSTANCES)
        await records.ensure()
        with pytest.raises(Unavailable):
            await records.put("g", b"record")
        await make_buckets(master)
        assert await records.put("g", b"record")
        assert "Violation" not in (tmp_path / "nats.log").read_text()


async def test_a_certificate_without_a_user_does_not_get_in(
    nats: TestServer, ours: TestAuthority
) -> None:
    for role, instance_id in (("gateway", "gateway-7"), ("nats", "nats"), ("admin", "ann")):
        with pytest.raises((NatsError, APIError, OSError, asyncio.TimeoutError)) as refused:
            async with connected(nats, ours, role, instance_id):
                pass
        assert "authorization violation" in str(refused.value).lower()


async def test_without_ids_the_certificates_of_a_role_are_told_apart_from_other_roles(
    tmp_path: Path, ours: TestAuthority
) -> None:
    """Pods need this, because their names are not known in advance."""
    holders = [Holder("master-scheduler"), Holder("prefill"), Holder("gateway")]
    async with nats_with(tmp_path, ours, holders) as server:
        async with bus_of(server, ours, "master-scheduler", "m-1") as master:
            await make_buckets(master)
            async with bus_of(server, ours, "prefill", "p-1") as prefill:
                records = bucket(prefill, INSTANCES)
                revision = await records.put("p-1", b"record")
                found = await bucket(master, INSTANCES).get("p-1")
                assert found is not None
                assert found.revision == revision
        async with connected(server, ours, "prefill", "p-2") as caller:
            tried = [
                "$KV.pdmesh-instances.p-1",
                "$KV.pdmesh-desired.current",
                "_INBOX.prefill.p-1.a",
            ]
            tried += ["$KV.pdmesh-tenants.x", "mesh.v1.request.finished.g-0", "_INBOX.gateway.g.a"]
            assert await caller.allowed_to_send(tried) == {tried[0], tried[2]}
