"""The six dashboards: one on whether the mesh is well, and one for each part of it."""

from __future__ import annotations

from typing import Final

from tools.observe.groups import GROUPS
from tools.observe.instance import INSTANCE
from tools.observe.kv import KV
from tools.observe.overview import OVERVIEW
from tools.observe.scenario import SCENARIO
from tools.observe.tenants import TENANTS

DASHBOARDS: Final = (OVERVIEW, SCENARIO, INSTANCE, KV, GROUPS, TENANTS)
