"""Runs several simulated models in one mesh of processes. An operator adds and removes models while
the mesh serves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import httpx

from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.launcher import first_groups
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sim_reference import sim_reference
from tests.support.waiting import until

SEEDS = {"small": 11, "large": 22, "third": 33}
NUM_TOKENS = 24


def groups(directory: Path, *models: str) -> Path:
    """A file of groups, with a prefill and a decode for the first model and a fusion instance for
    each other model.
    """
    lines = ["services:"]
    for model in models:
        folder, options = directory / "models" / model, f"{{sim_seed: {SEEDS[model]}}}"
        lines.append(f"  {model}: {{model: {model}, model_dir: {folder}, options: {options}}}")
    lines.append("scenarios:")
    lines += [f"  of-{model}: {{service: {model}, allow_single: true}}" for model in models]
    lines.append("groups:")
    for model in models:
        roles = "prefill: 1, decode: 1" if model == models[0] else "fusion: 1"
        lines.append(f"  {model}: {{scenario: of-{model}, {roles}}}")
    file = directory / "groups.yaml"
    file.write_text("\n".join(lines) + "\n")
    return file


def write_models(directory: Path) -> None:
    """Write the models' files. They differ only in the first line of the chat template."""
    for model in SEEDS:
        folder = directory / "models" / model
        write_sim_model(folder)
        (folder / "chat_template.jinja").write_text(
            f"[{model}]{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}"
        )


def expected(model: str, prompt: str) -> str:
    tokenizer = build_tokenizer()
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    ids, _ = sim_reference(tokenizer.encode(prompt).ids, sampling, SimParams(seed=SEEDS[model]))
    return tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")


async def test_models_are_added_and_removed_and_each_request_gets_its_own(tmp_path: Path) -> None:
    write_models(tmp_path)
    spec = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_blank=4, http_port=0, grpc_port=0,
        groups_file=groups(tmp_path, "small", "large"),
        # The gateway has no model files of its own, so it gets them from the instances.
        service_env={"gateway-0": {"PDMESH_GATEWAY_MODEL_DIR": str(tmp_path / "absent")}},
    )  # fmt: skip
    async with (
        Mesh(spec, tmp_path / "state") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):

        async def apply(*models: str) -> None:
            file = groups(tmp_path, *models)
            await first_groups.apply(file, mesh.nats_url, os.environ, mesh.token)

        async def listed() -> list[str]:
            answer = await client.get("/v1/models")
            return [model["id"] for model in answer.json()["data"]]

        def are_listed(*models: str) -> Callable[[], object]:
            async def check() -> bool:
                return await listed() == sorted(models)

            return check

        async def ask(model: str, text: str) -> None:
            body = {"model": model, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "prompt": text})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"].rstrip("\ufffd") == expected(model, text)
            messages = [{"role": "user", "content": text}]
            answer = await client.post("/v1/chat/completions", json={**body, "messages": messages})
            shown = answer.json()["choices"][0]["message"]["content"].rstrip("\ufffd")
            assert shown == expected(model, f"[{model}]{text}")

        async def ask_all(*models: str) -> None:
            asks = [ask(m, f"question {i} of many words") for m in models for i in range(6)]
            await asyncio.gather(*asks)

        await until(are_listed("small", "large"), 120)
        await ask_all("small", "large")
        unknown = await client.post("/v1/completions", json={"model": "third", "prompt": "x"})
        assert unknown.status_code == 404
        gateway = mesh.pid("gateway-0")
        await apply("small", "large", "third")
        await until(are_listed("small", "large", "third"), 120)
        await ask_all("third", "small", "large")
        await apply("small", "third")
        await until(are_listed("small", "third"), 120)
        gone = await client.post("/v1/completions", json={"model": "large", "prompt": "x"})
        assert gone.status_code == 503, "the gateway still lists the model as away"
        await ask_all("small", "third")
        assert mesh.pid("gateway-0") == gateway, "no process was restarted"
