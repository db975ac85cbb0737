"""An instance without a role of its own: blank until the master assigns one, and again after
it (S23).
"""

from __future__ import annotations

from pdmesh.core.model import Role
from pdmesh.instance.service import serve
from pdmesh.service_process import App, run
from pdmesh.services.instance.settings import Settings


async def _serve(settings: Settings, app: App) -> None:
    await serve(settings, app, Role(settings.role))


def main() -> None:
    run("instance", Settings, _serve)


if __name__ == "__main__":
    main()
