"""Tests LoRA adapters in a whole mesh of simulated engines. An operator adds, replaces and removes
them, and clients use them as models.

A running answer must keep its adapter, even if its decode dies.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands import adapters
from pdmesh.engine.base import Sampling
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.fakes.lora_adapters import write_adapter
from tests.support.sim_reference import sim_reference
from tests.support.sites import fleet
from tests.support.waiting import until

LORA = {"PDMESH_ENABLE_LORA": "true", "PDMESH_MAX_LORAS": "2", "PDMESH_MAX_LORA_RANK": "8"}
# With these host pools, the KV of an adapter's old content also lies in host memory.
TIERS = {"PDMESH_PREFILL_KV_HOST_POOL_BYTES": str(4 << 20)}


async def command(mesh: Mesh, *arguments: str) -> int:
    """Run `pdmesh adapters ...` and return its exit status."""
    options = build_parser().parse_args(["adapters", *arguments, "--nats-url", mesh.nats_url])
    return await asyncio.to_thread(adapters.run, options)


async def add(mesh: Mesh, name: str, folder: Path) -> None:
    await command(mesh, "add", name, "--model", "sim", "--path", str(folder))


async def models(client: httpx.AsyncClient) -> dict[str, Any]:
    return {m["id"]: m.get("parent") for m in (await client.get("/v1/models")).json()["data"]}


async def asked(
    client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int = 12
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    return {"status": response.status_code, **response.json()}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    assert answer["status"] == 200, answer
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def right(prompt: list[int], digest: str, max_tokens: int = 12) -> list[int]:
    return sim_reference(prompt, Sampling(max_tokens, ignore_eos=True), adapter=digest)[0]


def prompt_of(seed: int, length: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(40, 120) for _ in range(length)]


async def test_adapters_are_added_used_as_models_replaced_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("abc")}
    write_adapter(tmp_path / "large", 7, rank=32)
    async with (
        Mesh(fleet.one_by_one(**LORA, **TIERS), tmp_path / "mesh") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        assert await models(client) == {"sim": None}
        for bad, said in (
            ("large", "r is 32; the highest rank here is 8"),
            ("nowhere", "No such file"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await add(mesh, "bad", tmp_path / bad)
        with pytest.raises(InvalidRequest, match="default means whichever model serves"):
            await add(mesh, "default", tmp_path / "a")
        with pytest.raises(InvalidRequest, match="name of a model"):
            await add(mesh, "sim", tmp_path / "a")
        await add(mesh, "one", tmp_path / "a")
        await add(mesh, "two", tmp_path / "b")
        assert "checked by decode-0, prefill-0" in capsys.readouterr().out
        await until(lambda: _has(client, {"sim": None, "one": "sim", "two": "sim"}))

        # All requests run at once with the same prompts. Each adapter must give its own answers.
        names = {"one": digests["a"], "two": digests["b"], "sim": ""}
        cases = [(name, prompt_of(seed)) for seed in range(6) for name in names]
        answers = await asyncio.gather(*(asked(client, n, p) for n, p in cases))
        assert [tokens_of(a) for a in answers] == [right(p, names[n]) for n, p in cases]
        assert {a["model"] for a in answers} == set(names)
        await command(mesh, "list")
        shown = capsys.readouterr().out
        assert shown.count("decode-0, prefill-0") == 2

        # The mesh must compute a known prompt again only if the adapter has new content.
        prompt = prompt_of(0)
        assert cached(await asked(client, "one", prompt)) == 192
        await add(mesh, "one", tmp_path / "c")
        replaced: dict[str, Any] = {}

        async def is_replaced() -> bool:
            replaced.update(await asked(client, "one", prompt))
            return tokens_of(replaced) != right(prompt, digests["a"])

        await until(is_replaced)
        assert tokens_of(replaced) == right(prompt, digests["c"])
        assert cached(replaced) == 0
        assert cached(await asked(client, "sim", prompt)) == 192

        # Nothing loads the old content any more, so its files can be deleted.
        await asyncio.to_thread(shutil.rmtree, tmp_path / "a")
        assert tokens_of(await asked(client, "one", prompt)) == right(prompt, digests["c"])
        assert fleet.counted(mesh, ["prefill-0"], "pdmesh_adapters_loaded") == 2

        await command(mesh, "remove", "one")
        with pytest.raises(InvalidRequest, match="no adapter one"):
            await command(mesh, "remove", "one")
        await until(lambda: _has(client, {"sim": None, "two": "sim"}))
        gone = await asked(client, "one", prompt)
        assert (gone["status"], gone["error"]["code"]) == (404, "model_not_found")
        for name in ("prefill-0", "decode-0"):
            await until(
                lambda name=name: fleet.counted(mesh, [name], "pdmesh_adapters_loaded") == 1
            )
        await fleet.until_nothing_held(mesh, 20)


async def _has(client: httpx.AsyncClient, expected: dict[str, Any]) -> bool:
    return await models(client) == expected


async def test_a_running_answer_keeps_its_adapter_after_its_removal_and_a_death(
    tmp_path: Path,
) -> None:
    """The operator removes the adapter, and then the decode dies. The other decode must load the
    same content.
    """
    digest = write_adapter(tmp_path / "a", 1)
    slow = {"PDMESH_SIM_LAW": "demo", "PDMESH_DECODE_NUM_SLOTS": "4"}
    spec = MeshSpec(
        engine="sim", num_prefill=1, num_decode=2, http_port=0, grpc_port=0, env=LORA | slow,
        start_timeout_s=180,
    )  # fmt: skip
    async with (
        Mesh(spec, tmp_path / "mesh") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client,
    ):
        await add(mesh, "one", tmp_path / "a")
        await until(lambda: _has(client, {"sim": None, "one": "sim"}))
        prompt, num = prompt_of(3), 300
        answering = asyncio.create_task(asked(client, "one", prompt, num))
        victim: list[str] = []

        def is_decoding() -> bool:
            victim[:] = [
                name
                for name in ("decode-0", "decode-1")
                if fleet.counted(mesh, [name], "pdmesh_instance_tokens_total") > 10
            ]
            return bool(victim)

        await until(is_decoding)
        await command(mesh, "remove", "one")
        await until(lambda: _has(client, {"sim": None}))
        assert not answering.done()
        os.kill(mesh.pid(victim[0]), signal.SIGKILL)
        assert tokens_of(await answering) == right(prompt, digest, num)
        assert fleet.counted(mesh, ["gateway-0"], "pdmesh_request_migrations_total") >= 1


async def test_adding_an_adapter_to_a_mesh_without_adapter_slots_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 1)
    async with Mesh(fleet.one_by_one(), tmp_path / "mesh") as mesh:
        with pytest.raises(MeshError, match="takes adapters: set ENABLE_LORA"):
            await add(mesh, "one", tmp_path / "a")
