"""Sends random requests that Schemathesis makes from `/openapi.json`, both valid and invalid.

The gateway must not answer with a 5xx, must refuse the invalid requests, and must give answers that
match the document. Schemathesis reads the document as any client generator does. It runs in a
process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.pooling_instances import pooling_instance
from tests.support.sites import servers

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
SEED = 20261123


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    valkey = servers.valkey(tmp_path)
    await valkey.start()
    async with (
        gateway_mesh(tmp_path, 0, 0, redis_url=valkey.url) as mesh,
        pooling_instance("pooling-0") as pooling,
    ):
        mesh.register(pooling.record)
        for role, name in ((ROLE_PREFILL, "prefill-0"), (ROLE_DECODE, "decode-0")):
            await mesh.add(FakeInstance(role, name, supports_logprobs=True))
        yield mesh
    valkey.close()


def noted(
    look_up: Callable[[str, str], Awaitable[object]], name: str, found: dict[str, bool]
) -> Callable[[str, str], Awaitable[object]]:
    """Wrap `look_up` so that `found[name]` tells whether a call ever found a response."""

    async def looked_up(tenant: str, response_id: str) -> object:
        answer = await look_up(tenant, response_id)
        found[name] = found.get(name, False) or bool(answer)
        return answer

    return looked_up


async def told(url: str, *options: str) -> tuple[int, str]:
    """The exit status and the report of Schemathesis."""
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--seed", str(SEED), "--no-color", "--checks", ",".join(CHECKS), *options),
    )
    hooks = {"SCHEMATHESIS_HOOKS": "tests.support.api.schemathesis_hooks"}
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | hooks,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize(
    ("phases", "num_examples", "num_answered"),
    [
        ("fuzzing", 8, 5),
        pytest.param(
            *("coverage,fuzzing", 60, 30), marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]
        ),
    ],
)
async def test_no_request_of_the_document_gets_an_undocumented_answer(
    mesh: GatewayMesh, phases: str, num_examples: int, num_answered: int
) -> None:
    status, report = await told(mesh.url, "--phases", phases, "-n", str(num_examples))
    assert status == 0, report[-6000:]
    answered = [event for event in mesh.events if type(event).__name__ == "RequestFinished"]
    assert len(answered) >= num_answered, "most requests were refused: they show little"


async def test_an_answer_that_contradicts_the_document_is_found(
    mesh: GatewayMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the negative control. Schemathesis must notice an answer that breaks the schema."""
    monkeypatch.setattr("pdmesh.services.gateway.http.app._model_entry", lambda name: {"id": name})
    status, report = await told(
        mesh.url, "--phases", "fuzzing", "-n", "1", "--include-path", "/v1/models"
    )
    assert status == 1, report[-2000:]
    assert "Response violates schema" in report


@pytest.mark.parametrize(
    "num_examples",
    [10, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
async def test_links_lead_to_kept_responses(
    mesh: GatewayMesh, num_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random paths never contain the id of an existing response. So Schemathesis follows the
    document's links here.
    """
    store = mesh.gateway.http_app._responses._store
    found: dict[str, bool] = {}
    for name in ("load", "forget"):
        monkeypatch.setattr(store, name, noted(getattr(store, name), name, found))
    within = ("--include-path-regex", "^/v1/responses")
    status, report = await told(mesh.url, "--phases", "stateful", "-n", str(num_examples), *within)
    assert status == 0, report[-6000:]
    assert found == {"load": True, "forget": True}, report[-6000:]
