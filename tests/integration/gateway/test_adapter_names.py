"""Tests what happens when the name of a LoRA adapter gets a new meaning while the gateway encodes a
prompt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.errors import ModelNotFound, NoInstance
from pdmesh.services.gateway.access.access_control import ANYONES_PERMIT
from pdmesh.services.gateway.openai.calls import completion_spec
from pdmesh.services.gateway.openai.schema import CompletionRequest
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.routing.adapter_names import AdapterNames
from pdmesh.v1.admin_service_pb2 import RegisteredAdapter
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    """A mesh with two models, and with the adapter `mine` of the first model."""
    async with gateway_mesh(tmp_path) as mesh:
        for role, name in ((ROLE_PREFILL, "prefill-9"), (ROLE_DECODE, "decode-9")):
            await mesh.add(FakeInstance(role, name, model="other"))
        names(mesh)._on_entry(RegisteredAdapter(name="mine", model="tiny", digest="aa", path="/a"))
        yield mesh


def names(mesh: GatewayMesh) -> AdapterNames:
    return mesh.gateway.fleet._mesh.adapters


async def encoded(mesh: GatewayMesh) -> CallSpec:
    request = CompletionRequest(model="mine", prompt="abc", max_tokens=4)
    return await completion_spec(request, mesh.gateway.frontend, ANYONE)


async def opened(mesh: GatewayMesh, spec: CallSpec) -> CallSpec:
    prepared = await mesh.gateway.frontend.prepare(spec)
    call = mesh.gateway.frontend.open(prepared, "req-1", ANYONES_PERMIT)
    mesh.gateway.frontend.close(call)
    return call.spec


async def test_a_prompt_never_runs_on_another_model_than_it_was_encoded_for(
    mesh: GatewayMesh,
) -> None:
    """The other model would read the prompt's tokens as other text, and the gateway would decode
    the answer wrongly.
    """
    spec = await encoded(mesh)
    names(mesh)._on_gone("mine")
    with pytest.raises(ModelNotFound):
        await opened(mesh, spec)
    names(mesh)._on_entry(RegisteredAdapter(name="mine", model="other", digest="bb", path="/b"))
    with pytest.raises(NoInstance, match="another model"):
        await opened(mesh, spec)
    again = await opened(mesh, await encoded(mesh))
    assert again.base_model == "other"


async def test_a_name_that_a_model_takes_over_is_no_adapter_any_more(mesh: GatewayMesh) -> None:
    spec = await encoded(mesh)
    for role, name in ((ROLE_PREFILL, "prefill-8"), (ROLE_DECODE, "decode-8")):
        await mesh.add(FakeInstance(role, name, model="mine"))
    with pytest.raises(NoInstance, match="another model"):
        await opened(mesh, spec)


async def test_new_content_under_the_same_name_is_the_content_of_the_call(
    mesh: GatewayMesh,
) -> None:
    spec = await encoded(mesh)
    names(mesh)._on_entry(RegisteredAdapter(name="mine", model="tiny", digest="cc", path="/c"))
    adapter = (await opened(mesh, spec)).adapter
    assert adapter is not None
    assert (adapter.adapter.digest, adapter.model) == ("cc", "tiny")
