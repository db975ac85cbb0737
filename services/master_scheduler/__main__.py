"""The process of a master-scheduler, which decides where requests go."""

from __future__ import annotations

import asyncio

from pdmesh.api_keys import BadKeyFile
from pdmesh.config import read_secret
from pdmesh.followed_keys import FollowedKeys
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.service_process import App, StartupError, run
from pdmesh.services.master_scheduler.admin.callers import AdminAccess, OperatorSources
from pdmesh.services.master_scheduler.master import SERVICE, Master
from pdmesh.services.master_scheduler.settings import Settings


async def serve(settings: Settings, app: App) -> None:
    admin_token = read_secret(
        "ADMIN_TOKEN",
        settings.admin_token.get_secret_value(),
        settings.admin_token_file,
        "an admin token",
    )
    sources = _sources(settings)
    bus = await app.unless_stopping(
        NatsBus.connect(settings.nats_url, settings.instance_id, settings.num_nats_replicas)
    )
    registry = NatsRegistry(bus, settings.lease_s)
    view = await app.unless_stopping(registry.watch())
    page_url = lambda: f"http://{app.ops_address}/"  # noqa: E731
    access = AdminAccess(admin_token, page_url, sources)
    master = Master(settings, app, bus, registry, view, access)
    await app.unless_stopping(master.start())
    # While NATS is unreachable, the master stays ready, because the last view stays valid.
    app.add_readiness("view", lambda: True)
    stopping = asyncio.ensure_future(app.stopping.wait())
    failing = asyncio.ensure_future(master.wait_for_failure())
    await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    failed = failing.done()
    failing.cancel()
    await master.stop()
    await view.close()
    await bus.close()
    if failed:
        await failing


def _sources(settings: Settings) -> OperatorSources:
    """Raises StartupError if the key file cannot be used."""
    try:
        keys = None if settings.keys_file is None else FollowedKeys(settings.keys_file)
    except BadKeyFile as exc:
        raise StartupError(str(exc)) from exc
    return OperatorSources(keys, settings.token_verifier(), settings.claim_names)


def main() -> None:
    run(SERVICE, Settings, serve)


if __name__ == "__main__":
    main()
