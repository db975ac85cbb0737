"""Asks a process, at its HTTP endpoint for operators, whether it is alive and ready."""

from __future__ import annotations

import asyncio
import json
from typing import Final

_PROBE_S: Final = 2.0


async def not_ready(ops_address: str) -> list[str] | None:
    """The readiness checks that are false at the process. None if it does not answer."""
    answer = await _get(ops_address, "/health/ready")
    if answer is None:
        return None
    status, body = answer
    if status == 200:
        return []
    try:
        return [str(name) for name in json.loads(body).get("waiting_for", [])] or ["unknown"]
    except (ValueError, AttributeError):
        return ["unknown"]


async def is_live(ops_address: str) -> bool:
    answer = await _get(ops_address, "/health/live")
    return answer is not None and answer[0] == 200


async def _get(address: str, path: str) -> tuple[int, bytes] | None:
    """Send one HTTP request. Returns the status and the body, or None without a complete answer."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()
                )
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
        return int(head.split(b" ", 2)[1]), body
    except (OSError, TimeoutError, ValueError, IndexError):
        return None
