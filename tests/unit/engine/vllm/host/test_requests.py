"""A request for an adapter begins when vLLM has loaded the adapter.

The request uses the adapter until vLLM has ended the request.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.host import requests
from pdmesh.engine.vllm.host.adapters import VllmAdapters
from pdmesh.engine.vllm.host.requests import RequestEvents, Requests
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.errors import MeshError
from tests.fakes.lora_adapters import safetensors, write_adapter
from tests.support.waiting import until

LAYER = "model.layers.0.self_attn.q_proj.weight"


class Llm:
    """Stands in for vLLM. It answers a request with one token on demand, and records all calls in
    order.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.asked: dict[str, tuple[int, float]] = {}  # (priority, arrival) of each request

    async def add_lora(self, request: Any) -> None:
        self.heard.append(("load", request.name))

    async def remove_lora(self, number: int) -> None:
        self.heard.append(("unload", number))

    async def add_request(
        self,
        name: str,
        _: Any,
        __: Any,
        *,
        arrival_time: float,
        lora_request: Any,
        priority: int,
    ) -> Any:
        self.asked[name] = (priority, arrival_time)
        self.heard.append(("add", lora_request.name if lora_request else None))
        queue = self.queues[name] = asyncio.Queue()
        return SimpleNamespace(
            request_id=name, get_nowait=lambda: None, get=queue.get, close=lambda: None
        )

    async def abort(self, name: str, *, internal: bool) -> None:
        self.heard.append(("abort", name))
        self.finish(name)

    def finish(self, name: str) -> None:
        drawn = SimpleNamespace(token_ids=[7], finish_reason="stop", logprobs=None)
        output = SimpleNamespace(finished=True, outputs=[drawn], num_cached_tokens=0)
        self.queues[name].put_nowait(output)


@pytest.fixture(autouse=True)
def vllm_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the names of vLLM that are used here, because importing vLLM takes seconds."""

    def lora(lora_name: str, lora_int_id: int, lora_path: str) -> SimpleNamespace:
        return SimpleNamespace(name=lora_name, id=lora_int_id, path=lora_path)

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.inputs": {"tokens_input": lambda tokens, cache_salt: tokens, "mm_input": None},
        "vllm.multimodal": {},
        "vllm.multimodal.inputs": {"PlaceholderRange": lambda offset, length: (offset, length)},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lora},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": type("Dead", (Exception,), {})},
    }
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(requests, "sampling_params", lambda *_: None)


class Site:
    def __init__(self, folder: Path) -> None:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        weights = {LAYER: np.zeros((64, 64), np.float32)}
        (model / "model.safetensors").write_bytes(safetensors(weights))
        self.folder, self.llm = folder, Llm()
        self.drawn: list[int] = []
        self.refused: list[tuple[int, MeshError]] = []
        self.ended: list[int] = []
        self.errors: list[object] = []
        config = VllmConfig("i", 1, model, "m", max_adapters=1, max_adapter_rank=8)
        llm: Any = self.llm
        self.adapters = VllmAdapters(
            config, llm, folder / "own", lambda _: None, self.errors.append
        )
        events = RequestEvents(
            lambda drawn: self.drawn.append(drawn.leg),
            lambda leg, error: self.refused.append((leg, error)),
            self.ended.append,
            self.errors.append,
        )
        self.requests = Requests(llm, "i", None, lambda _: 0, events, self.adapters)

    def adapter(self, name: str, seed: int, rank: int = 4) -> Adapter:
        digest = write_adapter(self.folder / name, seed, rank=rank)
        return Adapter(name, digest, str(self.folder / name))

    def submit(self, leg: int, adapter: Adapter | None, priority: int = 1) -> None:
        self.requests.submit(
            leg, [1, 2], Sampling(1), 1, "", None, adapter=adapter, priority=priority
        )


async def test_a_request_begins_when_its_adapter_is_loaded_and_gives_it_back(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    site.submit(1, a)
    site.submit(2, None)
    await until(lambda: len(site.llm.queues) == 2)
    site.submit(3, b)  # leg 1 uses the only slot
    assert site.llm.heard.index(("load", f"adapter-{a.digest}")) < site.llm.heard.index(
        ("add", f"adapter-{a.digest}")
    )
    site.llm.finish("i-2")
    await until(lambda: site.ended == [2])
    assert [what for what, _ in site.llm.heard].count("load") == 1
    site.llm.finish("i-1")
    await until(lambda: "i-3" in site.llm.queues)
    assert [what for what, _ in site.llm.heard][-3:] == ["unload", "load", "add"]
    site.llm.finish("i-3")
    await until(lambda: site.ended == [2, 1, 3])
    assert site.drawn == [2, 1, 3]
    assert site.adapters.host.is_idle
    assert site.requests.is_idle
    assert site.errors == []


async def test_an_aborted_request_keeps_its_adapter_until_vllm_has_ended_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    site.submit(1, a)
    await until(lambda: "i-1" in site.llm.queues)
    site.submit(2, b)
    site.requests.cancel(1)
    await until(lambda: "i-2" in site.llm.queues)
    kinds = [what for what, _ in site.llm.heard]
    assert kinds.index("abort") < kinds.index("unload")
    site.requests.cancel(2)
    await until(lambda: site.ended == [1, 2])
    assert site.adapters.host.is_idle


async def test_a_request_whose_adapter_cannot_be_loaded_never_reaches_vllm(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.submit(1, site.adapter("large", 1, rank=16))
    site.submit(2, site.adapter("good", 2))
    await until(lambda: "i-2" in site.llm.queues)
    ((leg, error),) = site.refused
    assert (leg, error.reason) == (1, "ADAPTER_UNUSABLE")
    assert "r is 16" in error.message
    site.llm.finish("i-2")
    await until(lambda: site.ended == [1, 2])
    assert site.errors == []


async def test_a_request_given_up_while_its_adapter_loads_ends_at_once(tmp_path: Path) -> None:
    """Otherwise requests for an adapter on a hanging store would accumulate."""
    site = Site(tmp_path)
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    site.submit(1, a)
    await until(lambda: "i-1" in site.llm.queues)
    for leg in range(2, 20):  # leg 1 uses the only slot
        site.submit(leg, b)
    await until(lambda: site.adapters.host.num_waiting == 18)
    for leg in range(2, 20):
        site.requests.cancel(leg)
    await until(lambda: site.ended == list(range(2, 20)))
    assert [leg for leg, _ in site.refused] == site.ended, "their ranges are free"
    assert site.adapters.host.num_waiting == 0
    site.llm.finish("i-1")
    await until(lambda: site.requests.is_idle)
    assert site.adapters.host.is_idle
    assert ("load", f"adapter-{b.digest}") not in site.llm.heard
    assert site.errors == []


async def test_a_request_given_up_before_its_images_are_decoded_never_is(tmp_path: Path) -> None:
    """Otherwise a client that sends and cancels requests would fill the queue of the decoders."""
    site = Site(tmp_path)
    llm: Any = site.llm
    site.requests.images = VllmImages(llm, ImageFacts(1, (1,), 8))
    image = PromptImage(0, 1, bytes(32), b"neither an image nor looked at")
    site.requests.submit(1, [1, 2], Sampling(1), 1, "", None, images=[image])
    site.requests.cancel(1)
    await until(lambda: site.ended == [1])
    ((leg, error),) = site.refused
    assert (leg, error.message) == (1, "it was given up")
    assert site.llm.heard == []
    assert site.requests.is_idle


@pytest.mark.req("S83")
async def test_vllm_gets_the_priority_and_the_order_of_arrival_whatever_a_request_waits_for(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    site.submit(1, a)
    site.submit(2, b, priority=4)  # leg 1 uses the only slot
    site.submit(3, None, priority=0)
    await until(lambda: len(site.llm.queues) == 2)
    site.llm.finish("i-1")
    await until(lambda: "i-2" in site.llm.queues)
    asked = site.llm.asked
    assert [asked[f"i-{leg}"][0] for leg in (1, 2, 3)] == [1, 4, 0]
    assert list(asked)[-1] == "i-2", "it waited for its adapter"
    assert asked["i-1"][1] <= asked["i-2"][1] <= asked["i-3"][1]
    for leg in (2, 3):
        site.llm.finish(f"i-{leg}")
    await until(lambda: site.requests.is_idle)
