"""Lets every user of Redis try every command and every key, and compares the result with the lists
in this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from pdmesh.core.kv.prefix.prefix_index import IndexDelta
from pdmesh.embedded.servers import ValkeyServer
from pdmesh.kv.index.redis_index import RedisIndex
from pdmesh.server_permissions.role_permissions import REDIS_ROLES
from pdmesh.services.gateway.http.responses.store import KeepBounds, KeepOutcome, ResponseStore
from tests.support.sites.servers import TestServer

CONNECTION: Final = "hello auth quit reset ping select client|setname"
COMMANDS: Final = {
    "gateway": "evalsha script|load get set unlink exists time hget hset hdel hincrby zadd zrem "
    "zcard zrange pttl pexpire",
    "kv-cache-index": "multi exec get set del unlink smembers sadd srem hgetall hset",
    "operator": "get smembers scard hgetall",
}
# Redis lets every user run these.
FREE: Final = frozenset({"auth", "hello", "quit", "reset"})
INDEX_KEYS: Final = (
    "pdmesh:v1:instances",
    "pdmesh:v1:index:epoch",
    "pdmesh:v1:instance:prefill-0:version",
)
RESPONSE_KEYS: Final = (
    "pdmesh:v1:{response}:acme:resp_1",
    "pdmesh:v1:{response}-expiries",
    "pdmesh:v1:{response}-expiries:acme",
    "pdmesh:v1:{response}-sizes",
)
KEYS: Final = {"gateway": RESPONSE_KEYS, "kv-cache-index": INDEX_KEYS, "operator": INDEX_KEYS}
EVERY_KEY: Final = (*INDEX_KEYS, *RESPONSE_KEYS, "other", "pdmesh:v2:instances", "pdmesh:v1:x")
TESTER: Final = "tester"


class _WithTester(ValkeyServer):
    """A server with one more user, which may ask for the rights of the others."""

    def command(self) -> list[str]:
        found = super().command()
        file = Path(found[-1])
        file.write_text(file.read_text() + f"user {TESTER} on nopass ~* &* +@all\n")
        return found


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    server = _WithTester(tmp_path / "valkey", REDIS_ROLES)
    running = TestServer(server, tmp_path / "valkey")
    await running.start()
    yield server
    running.close()


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[Any]:
    connection: Any = Redis.from_url(url, decode_responses=True)
    try:
        yield connection
    finally:
        await connection.aclose()


async def every_command(tester: Any) -> dict[str, int]:
    """How many arguments each command needs at least. A subcommand's name is
    `command|subcommand`.
    """
    found: dict[str, int] = {}
    for entry in await tester.execute_command("COMMAND"):
        info = entry if isinstance(entry, dict) else {"name": entry[0], "arity": entry[1]}
        parts = [] if isinstance(entry, dict) or len(entry) < 10 else entry[9]
        if not parts:
            found[info["name"]] = abs(info["arity"]) - 1
        found |= {part[0]: abs(part[1]) - 2 for part in parts}
    return found


async def may_run(tester: Any, role: str, command: str, num: int, key: str) -> bool:
    said = await tester.execute_command(
        "ACL", "DRYRUN", role, *command.split("|"), *[key] * max(num, 0)
    )
    return "no permissions to run" not in str(said)


@pytest.mark.parametrize("role", sorted(REDIS_ROLES))
async def test_a_user_runs_its_own_commands_and_no_other(valkey: ValkeyServer, role: str) -> None:
    async with client(f"unix://{TESTER}:x@{valkey.url.removeprefix('unix://')}") as tester:
        raw: Any = Redis.from_url(f"unix://{TESTER}:x@{valkey.url.removeprefix('unix://')}")
        raw.connection_pool.connection_kwargs["decode_responses"] = True
        commands = await _commands(raw)
        await raw.aclose()
        assert len(commands) > 300
        allowed = set()
        for command, num in commands.items():
            try:
                if await may_run(tester, role, command, num, KEYS[role][0]):
                    allowed.add(command)
            except ResponseError:  # the arguments are wrong, so Redis has allowed the command
                allowed.add(command)
    wanted = set(f"{CONNECTION} {COMMANDS[role]}".split())
    assert allowed - FREE == wanted - FREE


async def _commands(raw: Any) -> dict[str, int]:
    raw.response_callbacks.pop("COMMAND", None)
    return await every_command(raw)


@pytest.mark.parametrize("role", sorted(REDIS_ROLES))
async def test_a_user_sees_and_changes_its_own_keys_and_no_other(
    valkey: ValkeyServer, role: str
) -> None:
    read, changed = set(), set()
    async with client(valkey.urls[role]) as own:
        for key in EVERY_KEY:
            with contextlib.suppress(NoPermissionError):
                await own.get(key)
                read.add(key)
            with contextlib.suppress(NoPermissionError):
                await own.set(key, "x")
                changed.add(key)
    assert read == set(KEYS[role])
    assert changed == (set() if role == "operator" else read)


async def test_nobody_gets_in_without_a_users_password(valkey: ValkeyServer) -> None:
    socket = urlsplit(valkey.url).path
    for url in (f"unix://{socket}", *(f"unix://{role}:wrong@{socket}" for role in REDIS_ROLES)):
        async with client(url) as stranger:
            with pytest.raises(RedisError, match=r"already authenticated|invalid username"):
                await stranger.get("pdmesh:v1:instances")


async def test_the_services_do_with_their_users_all_that_they_do(valkey: ValkeyServer) -> None:
    index = RedisIndex(valkey.urls["kv-cache-index"], 20.0)
    assert await index.epoch("first") == "first"
    delta = IndexDelta("prefill-0", 7, 1, stored=(b"a" * 16,), removed=(b"b" * 16,))
    await index.apply(delta)
    stored = await index.load("prefill-0")
    assert stored is not None
    await index.replace("prefill-0", stored)
    assert await index.instance_ids() == ["prefill-0"]
    await index.remove("prefill-0")
    assert await index.instance_ids() == []
    await index.close()
    store = ResponseStore(valkey.urls["gateway"], KeepBounds(60.0, 1, 1000, 100_000))
    for name in ("resp_1", "resp_2"):  # the second response evicts the first
        assert await store.keep("acme", name, b"{}") is KeepOutcome.KEPT
    assert await store.load("acme", "resp_1") is None
    assert await store.load("acme", "resp_2") == b"{}"
    await store.making([("acme", "resp_2")])
    assert await store.is_made("acme", "resp_2")
    await store.ask_to_stop("acme", "resp_2")
    assert await store.making([("acme", "resp_2")]) == [("acme", "resp_2")]
    await store.made("acme", "resp_2")
    assert await store.forget("acme", "resp_2")
    await store.close()
