"""Decides whether a canary gets the next request of this gateway (S24).

A canary is an extra group of instances that gets a new revision of a model first, with a share of
the requests. This module decides only for requests whose instances the gateway ranks without the
master. Each scenario, a kind of requests with its own groups, has its own share. The leading master
writes these shares to NATS. While NATS is unreachable, the last shares stay valid.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pdmesh.core.groups.revisions import canary_of, shares
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.net.nats.kv_bucket import KvWatch
from pdmesh.v1.admin_service_pb2 import Upgrades


class CanaryShares:
    """The shares of all canaries. There are none until `watch` has read them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._shares: Mapping[str, float] = {}
        self._watch: KvWatch | None = None

    def watch(self, store: DesiredStore) -> None:
        self._watch = store.watch_upgrades(self._on_upgrades)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()

    def draw(self, scenario: str) -> tuple[str, bool] | None:
        """The canary's group id, and whether the canary gets the next request.

        None if the scenario has no canary.
        """
        group_id = canary_of(scenario)
        share = self._shares.get(group_id)
        return None if share is None else (group_id, self._rng.random() < share)

    def _on_upgrades(self, upgrades: Upgrades) -> None:
        self._shares = shares(upgrades.upgrades)
