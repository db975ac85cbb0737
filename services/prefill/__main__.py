"""A prefill instance: computes prompts and hands their KV on. As `fusion` it decodes them too."""

from __future__ import annotations

from pdmesh.instance.service import serve
from pdmesh.lifecycle import App, run
from pdmesh.v1.common_pb2 import ROLE_FUSION, ROLE_PREFILL
from services.prefill.settings import Settings


async def _serve(settings: Settings, app: App) -> None:
    await serve(settings, app, ROLE_FUSION if settings.role == "fusion" else ROLE_PREFILL)


def main() -> None:
    run("prefill", Settings, _serve)


if __name__ == "__main__":
    main()
