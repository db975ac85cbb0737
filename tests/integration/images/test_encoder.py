"""Tests an encoder beside a simulated prefill. An encoder is an instance that makes the embeddings
of each image once, and the prefill fetches the embeddings.

Whatever happens to the encoder, every answer must be right, and no client may see an error.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.core.images.avoided_encoders import LIMIT
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_ENCODER
from tests.integration.images.test_mesh import ENV, TEXT, asked, chat, drawn, part, right
from tests.support.images.encoders import until_encoding
from tests.support.images.files import png
from tests.support.sites import fleet
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("S130")]


def spec(failpoint: str = "") -> MeshSpec:
    own = {"encoder-0": {"PDMESH_INSTANCE_FAILPOINT": failpoint}} if failpoint else {}
    return MeshSpec(
        engine="sim", num_prefill=1, num_decode=1, num_encoder=1, http_port=0, grpc_port=0,
        env=ENV, service_env=own,
    )  # fmt: skip


def awaited(mesh: Mesh, outcome: str, name: str = "prefill-0") -> float:
    return fleet.counted(mesh, [name], "pdmesh_images_awaited_total", pdmesh_outcome=outcome)


def encoded(mesh: Mesh, name: str = "encoder-0") -> float:
    return fleet.counted(mesh, [name], "pdmesh_images_encoded_total")


def prompts(mesh: Mesh, outcome: str) -> float:
    metric = "pdmesh_gateway_images_encoded_prompts_total"
    return fleet.counted(mesh, ["gateway-0"], metric, pdmesh_outcome=outcome)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with Mesh(spec(), tmp_path_factory.mktemp("encoder")) as running:
        await until_encoding(running)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client:
        yield client


async def test_an_image_of_many_prompts_is_encoded_once(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    """The texts before the images differ, so no prompt can use the KV of another one."""
    files = [png(101), png(102)]
    bodies = [chat(f"{n} {TEXT}", *map(part, files)) for n in range(4)]
    answers = [await asked(client, bodies[0])]
    answers += await asyncio.gather(*(asked(client, body) for body in bodies[1:]))
    for answer in answers:
        assert drawn(answer) == right(answer, *files)
    assert encoded(mesh) == len(files)
    assert awaited(mesh, "fetched") == len(files) * len(bodies)
    assert [awaited(mesh, o) for o in ("not_made", "late", "lost")] == [0, 0, 0]
    assert prompts(mesh, "encoded") == len(bodies)


async def test_a_prompt_without_images_asks_no_encoder(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    before = prompts(mesh, "encoded")
    answer = await asked(client, chat(TEXT))
    assert drawn(answer) == right(answer)
    assert prompts(mesh, "encoded") == before


async def test_tenants_share_no_embeddings(mesh: Mesh, client: httpx.AsyncClient) -> None:
    """Cache salts stand for tenants here. The tenant and the salt are both part of the name of an
    image's embeddings.
    """
    before = encoded(mesh)
    for salt in ("one", "two"):
        await asked(client, chat(TEXT, part(png(111)), cache_salt=salt))
    assert encoded(mesh) == before + 2


@pytest.mark.fault("F1")
async def test_an_encoder_that_dies_at_work_costs_no_answer(tmp_path: Path) -> None:
    async with (
        Mesh(spec("encode.computing=sigkill@2"), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await until_encoding(mesh)
        for seed in (121, 122):
            answer = await asked(client, chat(TEXT, part(png(seed))))
            assert drawn(answer) == right(answer, png(seed))
        assert (prompts(mesh, "encoded"), prompts(mesh, "lost")) == (1, 1)
        assert (awaited(mesh, "fetched"), awaited(mesh, "not_made")) == (1, 1)


@pytest.mark.fault("F2")
async def test_an_encoder_that_hangs_costs_a_bounded_time(tmp_path: Path) -> None:
    async with (
        Mesh(spec("encode.computing=sigstop@1"), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await until_encoding(mesh)
        answer = await asked(client, chat(TEXT, part(png(131))))
        assert drawn(answer) == right(answer, png(131))
        # Either the prefill gives up its wait, or the mesh notices first that the encoder is
        # silent.
        assert awaited(mesh, "late") + awaited(mesh, "not_made") == 1
        assert awaited(mesh, "fetched") == 0


@pytest.mark.fault("F34")
async def test_an_encoder_that_cannot_be_fetched_from_is_soon_not_asked(tmp_path: Path) -> None:
    """The encoder works, but all fetches of the prefill from this encoder are lost."""
    cut = {"prefill-0": {"PDMESH_PREFILL_FAILPOINT": "decode.asking[encoder-0]=drop"}}
    async with (
        Mesh(replace(spec(), service_env=cut), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await until_encoding(mesh)

        async def ask(seed: int) -> None:
            answer = await asked(client, chat(TEXT, part(png(seed))))
            assert drawn(answer) == right(answer, png(seed))

        seeds = itertools.count(211)
        await asyncio.gather(*(ask(next(seeds)) for _ in range(LIMIT)))
        assert (awaited(mesh, "lost"), awaited(mesh, "fetched")) == (LIMIT, 0)
        num_asked = 0.0
        # The gateway may need some time to read the prefill's record.
        async with asyncio.timeout(PATIENCE_S):
            while prompts(mesh, "encoded") > num_asked:
                num_asked = prompts(mesh, "encoded")
                await ask(next(seeds))
        assert awaited(mesh, "fetched") == 0


async def test_wrong_embeddings_are_noticed(tmp_path: Path) -> None:
    """This is the negative control. It shows that the prompt is computed with the fetched
    embeddings.
    """
    async with (
        Mesh(spec("encode.computing=zero-embeddings"), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await until_encoding(mesh)
        answer = await client.post("/v1/chat/completions", json=chat(TEXT, part(png(141))))
        assert answer.status_code >= 500


async def test_a_fusion_instance_fetches_embeddings_too(tmp_path: Path) -> None:
    async with (
        Mesh(replace(spec(), num_prefill=0, num_decode=0, num_fusion=1), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await until_encoding(mesh)
        answer = await asked(client, chat(TEXT, part(png(151))))
        assert drawn(answer) == right(answer, png(151))
        assert awaited(mesh, "fetched", "fusion-0") == 1


@pytest.mark.nightly
async def test_an_encoder_beside_the_prefill_raises_the_throughput(tmp_path: Path) -> None:
    """An image takes as long to encode as its tokens take to compute. The test sends the same
    prompts without and with an encoder. The load is so high that prefill and encoder always have
    work.
    """
    slow = {"PDMESH_SIM_LAW": "smollm2-cpu", "PDMESH_SIM_IMAGE_TOKENS": "500"}
    took: dict[int, float] = {}
    for num in (0, 1):
        wanted = replace(spec(), num_encoder=num, env=ENV | slow)
        async with (
            Mesh(wanted, tmp_path / str(num)) as mesh,
            httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
        ):
            await until_encoding(mesh, num)
            bodies = [chat(part(png(seed)), max_tokens=1) for seed in range(171, 201)]
            began, gate = time.monotonic(), asyncio.Semaphore(4)

            async def one(body: dict[str, object], gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await asked(client, body)

            await asyncio.gather(*map(one, bodies))
            took[num] = time.monotonic() - began
            if num:
                assert awaited(mesh, "fetched") > len(bodies) / 2
    assert took[1] < 0.85 * took[0], took


GROUPS = """
scenarios:
  default: {allow_single: true}
groups:
  seeing: {prefill: 1, decode: 1, encoder: 2}
"""


async def test_a_group_gets_a_lost_encoder_back(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS)
    blank = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_blank=4, http_port=0, grpc_port=0,
        groups_file=file, env=ENV,
    )  # fmt: skip
    async with (
        Mesh(blank, tmp_path / "state") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        bus = await NatsBus.connect(mesh.nats_url, "encoder-group-test")
        view = await NatsRegistry(bus, 3.0).watch()

        def encoders() -> dict[str, int]:
            return {
                r.instance_id: r.incarnation
                for r in view.records.values()
                if (r.role, r.phase) == (ROLE_ENCODER, INSTANCE_PHASE_READY)
            }

        await until(lambda: len(encoders()) == 2)
        answer = await asked(client, chat(TEXT, part(png(161))))
        assert drawn(answer) == right(answer, png(161))
        victim, incarnation = min(encoders().items())
        mesh.kill(victim)
        for seed in range(162, 168):
            answer = await asked(client, chat(TEXT, part(png(seed))))
            assert drawn(answer) == right(answer, png(seed))
        await until(lambda: len(encoders()) == 2 and encoders().get(victim) != incarnation)
        await view.close()
        await bus.close()
