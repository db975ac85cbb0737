"""Helpers that run a gateway in this process, with fake instances around it and a model that takes
images.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from pdmesh.v1.common_pb2 import ImageFacts
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh

_TEMPLATE: Final = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text or eos_token }}{% endfor %}{% endif %}{% endfor %}"
)


@contextlib.asynccontextmanager
async def image_mesh(directory: Path, **options: Any) -> AsyncIterator[GatewayMesh]:
    """A mesh whose instances all take images. `options` are those of `gateway_mesh`."""
    async with gateway_mesh(directory, template=_TEMPLATE, **options) as mesh:
        for name in mesh.instances:
            take_images(mesh, name)
        yield mesh


def take_images(mesh: GatewayMesh, name: str, *, max_images: int = 2, num_tokens: int = 4) -> None:
    """Change the record of an instance so that its model takes images."""
    placeholder = mesh.tokenizer.eos_token_id
    assert placeholder is not None
    expansion = [placeholder] * num_tokens
    record = mesh.instances[name].record()
    facts = ImageFacts(placeholder=placeholder, expansion=expansion, max_images=max_images)
    record.images.CopyFrom(facts)
    mesh.register(record)
