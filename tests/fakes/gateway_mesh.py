"""A gateway in this process with fake instances around it, for integration tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdmesh.services.gateway.access.access_control import AccessControl
from pdmesh.services.gateway.gateway import Gateway
from pdmesh.services.gateway.routing.fleet import MeshView
from pdmesh.services.gateway.settings import Settings
from pdmesh.services.gateway.text.chat_template import Conversation
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_FUSION, ROLE_PREFILL, InstanceRecord
from tests.fakes.fake_instance import FakeInstance, reference
from tests.fakes.memory_registry import MemoryStore, MemoryView
from tests.fakes.tiny_model import write_tiny_model


class GatewayMesh:
    """A gateway, fake instances, and the registry that connects them.

    `tokenizer` is the tokenizer of the gateway's folder, which every fake instance's model also
    has.
    """

    def __init__(self, settings: Settings, tokenizers: TokenizerPool, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizers, self.tokenizer = tokenizers, tokenizer
        self.store = MemoryStore()
        self.instances: dict[str, FakeInstance] = {}
        self.events: list[Any] = []
        self.access: AccessControl | None = None
        self.gateway: Gateway

    async def publish(self, subject: str, message: Any) -> None:
        self.events.append(message)

    async def start(self) -> None:
        def not_ready() -> list[str]:
            return [] if self.gateway.fleet.can_serve() else ["instances"]

        self.gateway = Gateway(
            self.settings,
            MeshView(MemoryView(self.store)),
            self.tokenizers,
            self,
            not_ready,
            self.access,
        )
        await self.gateway.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http.port}"

    def expected_text(self, prompt: str, num_tokens: int, seed: int | None = None) -> str:
        ids = list(self.tokenizer._encode(prompt, add_special_tokens=True))
        return self.tokenizer.text_stream(ids).feed(reference(ids, num_tokens, seed))

    def chat_prompt(self, content: str) -> str:
        return self.tokenizer.render_chat(Conversation([{"role": "user", "content": content}]))

    async def add(self, instance: FakeInstance) -> FakeInstance:
        instance.peers = list(self.instances.values())
        for other in self.instances.values():
            other.peers.append(instance)
        self.instances[instance.instance_id] = instance
        self.store.write(await instance.start(), 3600)
        return instance

    def register(self, record: InstanceRecord) -> None:
        self.store.write(record, 3600)

    @property
    def num_legs(self) -> int:
        return sum(len(i.legs) + len(i.tickets) for i in self.instances.values())


@contextlib.asynccontextmanager
async def gateway_mesh(
    directory: Path,
    num_prefills: int = 1,
    num_decodes: int = 1,
    num_fusions: int = 0,
    access: AccessControl | None = None,
    template: str = "",
    model_type: str = "",
    **settings: Any,
) -> AsyncIterator[GatewayMesh]:
    """Start the gateway and its instances.

    `template` and `model_type` are those of the model, and determine how answers are parsed.
    """
    values = {
        "http_port": 0,
        "grpc_port": 0,
        "drain_s": 1.0,
        "plan_timeout_s": 10.0,  # so that the gateway does not skip a slow test master
        "answer_s": 60.0,  # so that the gateway does not take a slow fake instance for a silent one
        "instance_id": "gateway-0",
        **settings,
    }
    tokenizers = TokenizerPool(Settings(**values).tokenizer_rules)
    await tokenizers.load_own(write_tiny_model(directory / "tiny", template, model_type))
    tokenizer = await tokenizers.get("tiny", None, list)
    mesh = GatewayMesh(Settings(**values), tokenizers, tokenizer)
    mesh.access = access
    roles = [
        *((ROLE_PREFILL, f"prefill-{i}") for i in range(num_prefills)),
        *((ROLE_DECODE, f"decode-{i}") for i in range(num_decodes)),
        *((ROLE_FUSION, f"fusion-{i}") for i in range(num_fusions)),
    ]
    for role, name in roles:
        await mesh.add(FakeInstance(role, name))
    await mesh.start()
    try:
        yield mesh
    finally:
        await mesh.gateway.stop()
        for timer in mesh.store.timers.values():
            timer.cancel()
        await asyncio.gather(*(i.stop() for i in mesh.instances.values()))
