"""Engine laws that our predictors cannot represent: they have tiles, a least time, and noise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdmesh.core.instance.step_time_law import Law
from pdmesh.engine.step_time_laws import MOCKER


@dataclass(frozen=True, slots=True)
class TiledLaw(Law):
    """A law whose work comes in tiles of `tile` tokens.

    A step takes at least `floor_s`, the time to read the weights. Each step's time is multiplied by
    a random factor. The factor's logarithm has the standard deviation `noise`.
    """

    tile: int = 256
    floor_s: float = 0.03
    noise: float = 0.1
    rng: random.Random = field(default_factory=lambda: random.Random(17), compare=False)

    def prefill_s(
        self, num_tokens: int, num_cached: int = 0, batch: int = 1, longest: int = 0
    ) -> float:
        whole = -(-num_tokens // self.tile) * self.tile
        seconds = Law.prefill_s(self, whole, num_cached, batch, longest)
        return max(self.floor_s, seconds) * self.rng.lognormvariate(0.0, self.noise)


def tiled(noise: float) -> TiledLaw:
    """The mocker's law in tiles.

    The law has a random state of its own, so each run needs a new one.
    """
    return TiledLaw(
        "tiled",
        prefill_fixed_s=0.008,
        prefill_token_s=MOCKER.prefill_token_s,
        prefill_pair_s=MOCKER.prefill_pair_s,
        step_fixed_s=MOCKER.step_fixed_s,
        step_context_s=MOCKER.step_context_s,
        noise=noise,
    )
