"""Disaggregated compared with aggregated serving on the same number of instances (S63).

The measure is the highest rate at which 99 % of requests keep both SLOs. The ratio of the two rates
depends on the law, the lengths and the SLOs. P/D-Serve's 6.7 is for its own hardware and its first
version. Aggregated instances run chunked prefill. The best of several chunk sizes counts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from loadtests.sim.load import Lengths, poisson
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.sim.profile import profile
from pdmesh.core.placement.policies import Weights
from pdmesh.core.ratio.throughput import Split, splits
from pdmesh.engine.step_time_laws import MOCKER

TOTAL: Final = 8
TTFT_S: Final = 2.0
NUM_REQUESTS: Final = 1200
MAX_SEEDS: Final = 3  # few, since bisections are slow
_SHARE: Final = 0.99
_SHAPE: Final = MeshShape(MOCKER, prefill_slots=4, decode_slots=64, ttft_slo_s=10.0)


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    lengths: Lengths
    tpot_s: float


SCENES: Final = (
    Scene("2000 in, 200 out, TPOT 25 ms", Lengths(2000, 200), 0.025),
    Scene("2000 in, 200 out, TPOT 15 ms", Lengths(2000, 200), 0.015),
    Scene("8000 in, 200 out, TPOT 25 ms", Lengths(8000, 200), 0.025),
    Scene("8000 in, 200 out, TPOT 15 ms", Lengths(8000, 200), 0.015),
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests/s of all instances together at which 99 % of the requests kept both SLOs."""

    scene: str
    mode: str
    seed: int
    per_s: float


def modes(scene: Scene) -> list[tuple[str, MeshShape]]:
    """The meshes to compare: the formula's split and its neighbours, and aggregated with three
    chunk sizes.
    """
    lengths = scene.lengths
    best = profile(
        MOCKER,
        num_prompt=lengths.num_prompt,
        num_output=lengths.num_output,
        prefill_slots=_SHAPE.prefill_slots,
        decode_slots=_SHAPE.decode_slots,
    ).best_split(TOTAL)
    near = [s for s in splits(TOTAL) if abs(s.num_prefill - best.num_prefill) <= 1]
    return [
        *((f"P/D {s}", _disaggregated(s)) for s in near),
        *(
            (f"aggregated, chunk {chunk}", replace(_SHAPE, num_fusion=TOTAL, chunk_tokens=chunk))
            for chunk in (256, 1024, 8192)
        ),
    ]


def _disaggregated(split: Split) -> MeshShape:
    return replace(_SHAPE, num_prefill=split.num_prefill, num_decode=split.num_decode)


def goodput(scene: Scene, mode: str, shape: MeshShape, seed: int) -> Goodput:
    """The goodput, found by bisection to 4 %."""
    low, high = 0.0, 4.0
    while keeps(scene, shape, high, seed):
        low, high = high, 2 * high
    while high - low > 0.04 * high:
        middle = (low + high) / 2
        if keeps(scene, shape, middle, seed):
            low = middle
        else:
            high = middle
    return Goodput(scene.name, mode, seed, low)


def keeps(scene: Scene, shape: MeshShape, per_s: float, seed: int) -> bool:
    """Whether 99 % of the requests keep both SLOs at this rate."""
    mesh = VirtualMesh(shape, "default", seed, Weights())
    until = NUM_REQUESTS / per_s
    rng = random.Random(seed)
    mesh.run(list(poisson(rng, until, per_s, lambda _: per_s, lambda _: scene.lengths)))
    good = sum(
        not s.is_refused and s.ttft_s <= TTFT_S and s.tpot_s <= scene.tpot_s for s in mesh.served
    )
    return good >= _SHARE * len(mesh.served)
