"""An instance that takes roles from the master: blank until one is assigned, unless its settings
give it a first role, and blank again after it was erased (S23).
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
