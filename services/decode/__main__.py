"""A decode instance: pulls the KV of computed prompts and draws all tokens after the first."""

from __future__ import annotations

from pdmesh.core.model import Role
from pdmesh.instance.service import serve
from pdmesh.service_process import App, run
from pdmesh.services.decode.settings import Settings


async def _serve(settings: Settings, app: App) -> None:
    await serve(settings, app, Role.DECODE)


def main() -> None:
    run("decode", Settings, _serve)


if __name__ == "__main__":
    main()
