"""The settings of one simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.deadlines import TICKET_LEASE_S
from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.instance.urgency import SchedulingPolicy
from pdmesh.core.kv.transfer.incoming_blocks import MAX_PULLS
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.step_time_laws import DEMO

CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class SimConfig:
    instance_id: str
    incarnation: int
    model: str
    model_fingerprint: str
    num_slots: int
    params: SimParams = field(default_factory=SimParams)
    law: Law = DEMO
    num_kv_blocks: int = 4096
    chunk_tokens: int = CHUNK_TOKENS  # the most prompt tokens computed per step
    ticket_lease_s: float = TICKET_LEASE_S
    tier_timeout_s: float = 0.5  # longest wait of a prompt for its blocks from the tiers
    max_pulls: int = MAX_PULLS  # pulls of KV at the same time
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    max_adapters: int = 0  # loaded at the same time; 0 if the engine takes no adapters
    max_adapter_rank: int = 16
    images: ImageFacts | None = None  # None if the model takes no images
    fail_every: int = 0  # one prompt in this many fails; 0 for none
