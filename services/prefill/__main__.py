"""A prefill instance: computes prompts and hands on their KV.

With the role `fusion`, it also draws all later tokens itself.
"""

from __future__ import annotations

from pdmesh.core.model import Role
from pdmesh.instance.service import serve
from pdmesh.service_process import App, run
from pdmesh.services.prefill.settings import Settings


async def _serve(settings: Settings, app: App) -> None:
    await serve(settings, app, Role(settings.role))


def main() -> None:
    run("prefill", Settings, _serve)


if __name__ == "__main__":
    main()
