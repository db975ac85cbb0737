"""The sim engine: a model whose tokens depend on every byte of KV, and whose time is a law (DESIGN 8)."""

from pdmesh.engine.sim.config import SimConfig
from pdmesh.engine.sim.engine import SimEngine
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.sim.reference import sim_reference

__all__ = ["SimConfig", "SimEngine", "SimParams", "sim_reference"]
