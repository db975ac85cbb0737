"""Checks the user's own NATS and Redis servers before a mesh starts.

Without these checks, the mesh's processes would wait forever for a server that does not answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdmesh.config import url_problem, without_password
from pdmesh.errors import MeshError
from pdmesh.kv.index.redis_index import RedisIndex
from pdmesh.net.nats.bus import NatsBus

_ANSWER_S: Final = 3.0


async def nats_problem(url: str) -> str:
    """Describe the NATS server's problem in one line. Returns "" if the server can be used."""
    if problem := url_problem(url):
        return f"--nats-url: {problem}"
    try:
        async with asyncio.timeout(_ANSWER_S):
            bus = await NatsBus.connect(url, "pdmesh-up")
    except (TimeoutError, OSError, ValueError):
        at = without_password(url)
        return (
            f"NATS does not answer at {at}, or rejects this user and password; fix it, or omit "
            "--nats-url to start one"
        )
    except MeshError as exc:
        return exc.message
    await bus.close()
    return ""


async def redis_problem(url: str) -> str:
    """Describe the problem of the Redis or Valkey server in one line. Returns "" for no problem."""
    if problem := url_problem(url):
        return f"--redis-url: {problem}"
    try:
        index = RedisIndex(url, _ANSWER_S)
    except ValueError as exc:
        return f"--redis-url: {exc}"
    try:
        await index.instance_ids()
    except MeshError as exc:
        at = without_password(url)
        return f"{exc.message} ({at}); fix it, or omit --redis-url to start one"
    finally:
        await index.close()
    return ""
