"""An instance that takes its role from the master (S23).

At start the instance has the role in its settings, or none. An instance without a role is called
blank, and waits until the master assigns one. If the master withdraws the role, the instance frees
its engine and is blank again.
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
