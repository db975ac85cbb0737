"""The simulated engine of pooling instances: makes vectors and scores from the tokens of texts.

A hash with the model's seed gives a vector to each token and to each pair of neighbouring tokens. A
text's vector is the normalised, weighted sum of these vectors, so texts with common tokens are near
each other. The logit of a pair of texts is eight times the cosine of their vectors. The score is
the sigmoid of the logit. One loop computes one input after the other, as a device does, in the time
that a formula gives.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pdmesh import failpoints
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.engine.base import EngineInfo, EngineStats, Pooled, PoolJob
from pdmesh.engine.serial_jobs import SerialJobs

_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_CHUNK: Final = 512  # tokens whose vectors are made together

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimPoolingConfig:
    model: str
    model_fingerprint: str
    num_slots: int
    max_model_len: int
    seed: int
    num_dimensions: int
    law: Law
    scores_pairs: bool = False  # whether the model is a cross-encoder; if not, it makes vectors


class SimPoolingEngine(SerialJobs[PoolJob]):
    """See `pdmesh.engine.base.PoolingEngine`."""

    def __init__(self, config: SimPoolingConfig) -> None:
        super().__init__()
        self._config = config

    @property
    def facts(self) -> PoolingFacts:
        if self._config.scores_pairs:
            classify = frozenset({PoolingTask.CLASSIFY})
            return PoolingFacts(classify, is_cross_encoder=True, num_classes=1)
        embed = frozenset({PoolingTask.EMBED})
        return PoolingFacts(embed, self._config.num_dimensions, is_matryoshka=True)

    async def start(self) -> EngineInfo:
        self._start_loop("sim-pooling")
        config = self._config
        return EngineInfo(
            engine="sim",
            model=config.model,
            model_fingerprint=config.model_fingerprint,
            block_size=1,
            num_kv_blocks=0,
            kv_bytes_per_token=0,
            max_model_len=config.max_model_len,
            pooling=self.facts,
        )

    def pool(self, job: PoolJob) -> None:
        failpoints.hit("pool.accepted")
        self._begin(job)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._jobs), num_signs=self._num_signs, num_tokens=self._num_tokens
        )

    # -- one job ----------------------------------------------------------------------------------

    async def _compute(self, job: PoolJob) -> None:
        values: list[bytes] = []
        for place, tokens in enumerate(job.inputs):
            await self._wait_out(self._config.law.prefill_s(len(tokens)))
            failpoints.hit("pool.computing")
            if not self._is_wanted(job):
                return
            self._num_tokens += len(tokens)
            values.append(self._values(job, place).astype("<f4").tobytes())
        data = b"".join(values)
        self._end(job, Pooled(job.leg, data, len(data) // (4 * len(job.inputs))))

    def _values(self, job: PoolJob, place: int) -> Vector:
        tokens, seed = job.inputs[place], self._config.seed
        num = self._config.num_dimensions
        if job.task is PoolingTask.CLASSIFY:
            cut = job.first_lengths[place] if job.first_lengths else len(tokens) // 2
            first, second = vector(tokens[:cut], num, seed), vector(tokens[cut:], num, seed)
            logit = 8.0 * float(first @ second)
            return np.array([logit if job.use_activation is False else 1 / (1 + math.exp(-logit))])
        made = vector(tokens, num, seed)[: job.num_dimensions or num]
        return made if job.use_activation is False else normalised(made)


def normalised(values: Vector) -> Vector:
    length = float(np.linalg.norm(values))
    return values / length if length else values


def vector(tokens: array[int], num_dimensions: int, seed: int) -> Vector:
    """The normalised vector of a text."""
    ids = np.asarray(tokens, dtype=np.uint64)
    pairs = (ids[:-1] << np.uint64(32)) | ids[1:] if len(ids) > 1 else ids[:0]
    total = np.zeros(num_dimensions)
    for keys, weight in ((ids, 1.0), (pairs | np.uint64(1 << 63), 0.5)):
        for start in range(0, len(keys), _CHUNK):
            total += weight * _hashed(keys[start : start + _CHUNK], num_dimensions, seed).sum(0)
    return normalised(total)


def _hashed(keys: npt.NDArray[np.uint64], num_dimensions: int, seed: int) -> Vector:
    """A row of `num_dimensions` numbers from -1 to 1 for each key.

    Each number is the splitmix64 of the key, the column and the seed.
    """
    with np.errstate(over="ignore"):
        start = keys * _STEP + np.uint64(seed) * _MIX[0]
        places = (np.arange(num_dimensions, dtype=np.uint64) + np.uint64(1)) * _STEP
        state = start[:, None] + places[None, :]
        state = (state ^ (state >> np.uint64(30))) * _MIX[0]
        state = (state ^ (state >> np.uint64(27))) * _MIX[1]
        state ^= state >> np.uint64(31)
    numbers: Vector = state.astype(np.float64) / 2.0**63 - 1.0
    return numbers
