"""Examines the settings in the environment, by asking services how they read them.

The node agent is not asked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pdmesh.cli.doctor.diagnosis import Diagnosis, ok, problem, warning
from pdmesh.config import SHARED_PREFIX
from pdmesh.core.suggestion import suggestion

_SERVICES: Final = (
    "gateway", "master_scheduler", "prefill", "decode", "instance", "kv_cache_index",
    "health_monitor",
)  # fmt: skip
_AT_ONCE: Final = 2
# Variables that only the `pdmesh` command and tests read. The names here lack the prefix.
_OTHERS: Final = frozenset(
    SHARED_PREFIX + name
    for name in (
        "API_KEY", "ADMIN_TOKEN", "DETACHED", "FAILPOINT", "GRPC_PORT", "HTTP_PORT", "NATS_PORT",
        "NATS_SERVER", "TOKEN", "VALKEY_SERVER", "VLLM_HOST_PID",
    )
)  # fmt: skip
_NODE_AGENT: Final = f"{SHARED_PREFIX}NODE_AGENT_"


async def examine_settings(environ: Mapping[str, str]) -> list[Diagnosis]:
    asked = asyncio.Semaphore(_AT_ONCE)

    async def ask(service: str) -> tuple[str, str]:
        async with asked:
            return await _config_of(service, environ)

    answers = await asyncio.gather(*(ask(service) for service in _SERVICES))
    return list(of_settings(answers, environ))


def of_settings(
    answers: Iterable[tuple[str, str]], environ: Mapping[str, str]
) -> Iterator[Diagnosis]:
    """`answers` has the settings that each service prints, and the service's error or ""."""
    refused = sorted({error for _, error in answers if error})
    yield from (problem("settings", error, "correct or unset it") for error in refused)
    known = set(_OTHERS)
    for config, _ in answers:
        known.update(line.partition("=")[0] for line in config.splitlines())
    strange = list(_strange(known, environ)) if not refused else []
    yield from strange
    if not refused and not strange:
        num = sum(name.startswith(SHARED_PREFIX) for name in environ)
        yield ok("settings", f"{num} variables are set, and every service accepts its own")


def _strange(known: set[str], environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Warnings about variables that no service reads."""
    shared = {SHARED_PREFIX + _field(name) for name in known}
    for name in sorted(environ):
        full = name.partition("__")[0]
        is_ours = name.startswith(SHARED_PREFIX) and not name.startswith(_NODE_AGENT)
        if is_ours and full not in known | shared:
            hint = suggestion(full, known | shared)
            yield warning("settings", f"nothing reads {name}{hint}", "correct or unset it")


def _field(name: str) -> str:
    """The setting's own name, for example `NATS_URL` for `PDMESH_GATEWAY_NATS_URL`."""
    for service in _SERVICES:
        prefix = f"{SHARED_PREFIX}{service.upper()}_"
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name.removeprefix(SHARED_PREFIX)


async def _config_of(service: str, environ: Mapping[str, str]) -> tuple[str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"pdmesh.services.{service}", "--print-config",
        env=dict(environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, error = await process.communicate()
    return printed.decode(), error.decode().strip() if process.returncode else ""
