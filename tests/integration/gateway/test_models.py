"""Tests several models behind one gateway. Each request must use its own model's tokenizer and
instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.text_files import read_text_files
from pdmesh.v1 import scheduler_service_pb2
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_FUSION, ROLE_PREFILL, Role
from pdmesh.v1.instance_service_pb2 import REJECT_REASON_WRONG_MODEL
from tests.fakes.fake_instance import FakeInstance, reference
from tests.fakes.fake_master import FakeMaster, leader_at, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import write_tiny_model
from tests.support.waiting import until

ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE}


class Models:
    """The models of a mesh. Each has its own instances and tokenizer."""

    def __init__(self, mesh: GatewayMesh, directory: Path) -> None:
        self.mesh, self.directory = mesh, directory
        self.instances: dict[str, list[FakeInstance]] = {}
        self.tokenizers: dict[str, Tokenizer] = {}

    async def add(self, name: str, shift: int, scenario: str = "", **more: Any) -> None:
        folder = write_tiny_model(self.directory / name, shift=shift)
        self.tokenizers[name] = Tokenizer.load(folder, max_chars=1 << 20)
        for role, number in ROLES.items():
            instance = self.instance(f"{role}-of-{name}", number, name, scenario or name, **more)
            instance.text = read_text_files(folder)
            self.instances.setdefault(name, []).append(await self.mesh.add(instance))

    def instance(
        self, instance_id: str, role: Role.ValueType, model: str, scenario: str, **more: Any
    ) -> FakeInstance:
        return FakeInstance(
            role, instance_id, model=model, scenario=scenario,
            group_id=scenario, fingerprint=f"fp-{model}", **more,
        )  # fmt: skip

    def remove(self, name: str) -> None:
        for instance in self.instances.pop(name):
            self.mesh.store.remove(instance.instance_id, is_lease_end=False)

    def expected(self, name: str, prompt: str, num_tokens: int) -> str:
        tokenizer = self.tokenizers[name]
        ids = list(tokenizer._encode(prompt, add_special_tokens=True))
        return tokenizer.text_stream(ids).feed(reference(ids, num_tokens))

    def check_all_met_their_own(self) -> None:
        for name, instances in self.instances.items():
            for instance in instances:
                assert {prefill.model for prefill in instance.prefills} <= {name}
                assert {start.model for start in instance.starts} <= {name}


@pytest.fixture
async def models(tmp_path: Path) -> AsyncIterator[Models]:
    async with gateway_mesh(tmp_path, num_prefills=0, num_decodes=0) as mesh:
        models = Models(mesh, tmp_path)
        await models.add("alpha", 1, scenario="default")
        await models.add("beta", 2)
        yield models


@pytest.fixture
async def client(models: Models) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{models.mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_each_request_gets_the_text_of_its_own_model(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    await models.add("gamma", 3)

    async def completion(model: str, number: int) -> None:
        prompt = f"prompt {number}"
        answer = await client.completions.create(model=model, prompt=prompt, max_tokens=20)
        assert (answer.model, answer.choices[0].text) == (model, models.expected(model, prompt, 20))

    async def chat(model: str, number: int) -> None:
        content = f"words {number}"
        shift = 1 + list(models.instances).index(model)
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], max_tokens=12, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        prompt = f"[{shift}]<user>{content}\n<assistant>"
        assert text == models.expected(model, prompt, 12)

    asks = [ask(m, i) for i in range(8) for m in models.instances for ask in (completion, chat)]
    await asyncio.gather(*asks)
    models.check_all_met_their_own()
    for name, instances in models.instances.items():
        # A slow instance may be silent for so long that the gateway asks another instance, too, for
        # the files of the model.
        assert {i.num_texts for i in instances} in ({1}, {0, 1}), name


async def test_an_unknown_model_is_a_404_in_openais_form(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        async with httpx.AsyncClient() as plain:
            body = {"model": "delta", "prompt": "x"}
            if "chat" in path:
                body = {"model": "delta", "messages": [{"role": "user", "content": "x"}]}  # type: ignore[dict-item]
            answer = await plain.post(models.mesh.url + path, json=body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "model")
        assert error["code"] == "model_not_found"
        assert "'delta' does not exist" in error["message"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("delta")


async def test_the_list_of_models_shows_what_can_be_served_now(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    async def listed() -> dict[str, Any]:
        return {m.id: m.to_dict() async for m in client.models.list()}

    await models.add("gamma", 3, max_model_len=512)
    found = await listed()
    assert list(found) == ["alpha", "beta", "gamma"]
    assert found["gamma"]["max_model_len"] == 512
    assert found["gamma"] == (await client.models.retrieve("gamma")).to_dict()
    assert {m["owned_by"] for m in found.values()} == {"pdmesh"}
    for instance in models.instances["beta"]:
        record = instance.record()
        record.is_draining = True
        models.mesh.register(record)
    assert list(await listed()) == ["alpha", "gamma"], "a model that leaves gets no new requests"
    with pytest.raises(openai.InternalServerError):
        await client.models.retrieve("beta")


async def test_models_come_and_go_while_the_gateway_serves(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    """A stream of another model must continue while models come and go."""
    for instance in models.instances["alpha"]:
        instance.step_s = 0.005
    stream = await client.completions.create(
        model="alpha", prompt="on and on", max_tokens=300, stream=True
    )
    texts = [(await anext(stream)).choices[0].text]
    for number in range(3):
        name = f"new-{number}"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model=name, prompt="x")
        await models.add(name, 10 + number)
        answer = await client.completions.create(model=name, prompt="x", max_tokens=9)
        assert answer.choices[0].text == models.expected(name, "x", 9)
        models.remove(name)
        with pytest.raises(openai.InternalServerError) as away:
            await client.completions.create(model=name, prompt="x")
        assert away.value.status_code == 503
    texts += [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == models.expected("alpha", "on and on", 300)
    models.check_all_met_their_own()


async def test_default_is_the_model_of_the_scenario(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    plain = await client.completions.create(model="default", prompt="x", max_tokens=5)
    assert (plain.model, plain.choices[0].text) == ("alpha", models.expected("alpha", "x", 5))
    in_beta = await client.completions.create(
        model="default", prompt="x", max_tokens=5, extra_body={"scenario": "beta"}
    )
    assert (in_beta.model, in_beta.choices[0].text) == ("beta", models.expected("beta", "x", 5))


async def test_a_model_that_a_scenario_does_not_serve_is_not_replaced_by_one_that_it_does(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises((openai.NotFoundError, openai.InternalServerError, openai.RateLimitError)):
        await client.completions.create(
            model="beta", prompt="x", max_tokens=5, extra_body={"scenario": "default"}, timeout=30
        )
    models.check_all_met_their_own()
    assert not any(i.prefills for i in models.instances["alpha"])


async def test_only_the_model_with_broken_files_is_refused(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    await models.add("broken", 5)
    assert await client.completions.create(model="alpha", prompt="x", max_tokens=2)
    (models.directory / "broken" / "tokenizer.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="broken", prompt="x", max_tokens=2)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert "tokenizer" in refused.value.message
        answer = await client.completions.create(model="beta", prompt="x", max_tokens=2)
        assert answer.choices[0].text == models.expected("beta", "x", 2)
    assert [i.num_texts for i in models.instances["broken"]] == [1, 1], (
        "each instance was asked once"
    )


class WrongMaster(FakeMaster):
    """A master that plans every request to the instances of one model."""

    def __init__(self, instances: list[FakeInstance]) -> None:
        super().__init__()
        self.instances, self.num_asked = instances, 0

    async def Plan(self, request: Any, context: Any) -> scheduler_service_pb2.PlanResponse:
        self.num_asked += len(request.queries)
        prefill, decode = (
            scheduler_service_pb2.Candidate(instance_id=i.instance_id, incarnation=i.incarnation)
            for i in self.instances
        )
        result = scheduler_service_pb2.PlanResult(prefills=[prefill], decodes=[decode])
        return scheduler_service_pb2.PlanResponse(
            epoch=1, results=[result for _ in request.queries]
        )


async def test_a_plan_of_another_models_instances_is_not_followed(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    master = WrongMaster(models.instances["alpha"])
    async with serving(master) as port:
        models.mesh.register(leader_at(port))
        answer = await client.completions.create(model="beta", prompt="x", max_tokens=9)
        assert answer.choices[0].text == models.expected("beta", "x", 9)
        assert master.num_asked
    assert not any(i.prefills or i.starts for i in models.instances["alpha"])


async def test_after_a_refusal_for_the_wrong_model_the_right_instance_is_asked(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    """The instance restarted with another model, but its record is not up to date. So it
    refuses.
    """
    liar = models.instance("liar", ROLE_FUSION, "beta", "beta")
    liar.text = models.instances["beta"][0].text
    liar.reject_with = REJECT_REASON_WRONG_MODEL
    await models.mesh.add(liar)

    async def ask(number: int) -> None:
        answer = await client.completions.create(model="beta", prompt=f"{number}", max_tokens=9)
        assert answer.choices[0].text == models.expected("beta", f"{number}", 9)

    await asyncio.gather(*(ask(number) for number in range(8)))
    assert liar.num_rejected
    assert {prefill.model for prefill in liar.prefills} == {"beta"}


async def test_tokens_go_only_to_instances_with_the_same_vocabulary(
    models: Models, client: openai.AsyncOpenAI
) -> None:
    """A new release of a model may have another vocabulary under the same name."""
    folder = write_tiny_model(models.directory / "beta-2", shift=7)
    newer = models.instance("a-newer", ROLE_FUSION, "beta", "beta")
    newer.text = read_text_files(folder)
    await models.mesh.add(newer)
    for number in range(6):
        answer = await client.completions.create(model="beta", prompt=f"{number}", max_tokens=9)
        assert answer.choices[0].text == models.expected("beta", f"{number}", 9)
    assert not newer.prefills, "most instances have the older vocabulary"
    models.remove("beta")
    models.tokenizers["beta"] = Tokenizer.load(folder, max_chars=1 << 20)
    answer = await client.completions.create(model="beta", prompt="after", max_tokens=9)
    assert answer.choices[0].text == models.expected("beta", "after", 9)


async def test_a_hundred_models_in_one_gateway(tmp_path: Path) -> None:
    """The gateway has room for twenty tokenizers. All hundred models must answer twice."""
    room = 20 * (1 << 20) + (1 << 19)
    async with gateway_mesh(
        tmp_path, num_prefills=0, num_decodes=0, tokenizer_cache_bytes=room
    ) as mesh:
        models = Models(mesh, tmp_path)
        names = [f"model-{i}" for i in range(100)]
        for number, name in enumerate(names):
            folder = write_tiny_model(tmp_path / name, shift=number % 90)
            models.tokenizers[name] = Tokenizer.load(folder, max_chars=1 << 20)
            instance = models.instance(f"fusion-{name}", ROLE_FUSION, name, name)
            instance.text = read_text_files(folder)
            models.instances[name] = [await mesh.add(instance)]
        async with openai.AsyncOpenAI(
            base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            assert len((await client.models.list()).data) == 100

            async def ask(name: str, prompt: str) -> None:
                answer = await client.completions.create(model=name, prompt=prompt, max_tokens=7)
                assert answer.choices[0].text == models.expected(name, prompt, 7)

            for turn in range(2):
                for first in range(0, 100, 10):
                    await asyncio.gather(*(ask(n, f"{turn}") for n in names[first : first + 10]))
        pool = mesh.gateway.frontend.shared.tokenizers
        assert len(pool._resident) <= 20
        models.check_all_met_their_own()
        await until(lambda: not mesh.num_legs)
