"""The simulated engine's decode batch: each step draws a token for every sequence, in numpy.

A sequence belongs to one leg, which is a request's stay on this engine. Each sequence has a column
in a matrix of 64-bit words. The columns have no gaps: when a sequence leaves, the last column takes
its place. A step takes some tens of microseconds for a batch of any usual size. Sequences under a
constraint take longer, because they draw one after another. A guide follows such an answer and
decides which tokens may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pdmesh.engine.base import FinishReason
from pdmesh.engine.sim.constraints.draws import LimitedGuide, guided_vocabulary
from pdmesh.engine.sim.model import MASK, SimModel, Words, mix, mix_words
from pdmesh.engine.sim.vocabulary import EOS_ID
from pdmesh.errors import EngineFailed

_STATE, _DIGEST, _KEY, _LAST, _NUM, _LEFT, _MAY_END, _DRAWN, _MIN_LEFT = range(9)
_ONE: Final = np.uint64(1)


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence at the time when it joins the batch.

    The KV of its `num_tokens` tokens is in memory. The token after them, `last`, is drawn but not
    computed.
    """

    leg: int
    state: int
    digest: int
    num_tokens: int
    last: int
    key: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # tokens still to draw before a stop token may end the answer
    guide: LimitedGuide | None = None  # the guide has taken `last` already


@dataclass(frozen=True, slots=True)
class BatchStep:
    legs: Sequence[int]
    token_ids: list[int]
    finished: list[tuple[int, FinishReason]]
    failed: Sequence[int] = ()  # legs whose constraint failed, so that they drew no token

    @property
    def drawn(self) -> tuple[Sequence[int], list[int]]:
        """The legs that drew a token, and their tokens."""
        if not self.failed:
            return self.legs, self.token_ids
        pairs = zip(self.legs, self.token_ids, strict=True)
        drew = [pair for pair in pairs if pair[0] not in self.failed]
        return [leg for leg, _ in drew], [token_id for _, token_id in drew]


class DecodeBatch:
    def __init__(self, model: SimModel, capacity: int) -> None:
        self._model = model
        self._columns: Words = np.zeros((9, capacity), np.uint64)
        self._history = np.zeros((capacity, model.params.max_model_len), np.uint32)
        self._legs: list[int] = []
        self._column_of: dict[int, int] = {}
        self._stops: dict[int, frozenset[int]] = {}  # by leg: the stop tokens besides EOS, if any
        self._guides: dict[int, LimitedGuide] = {}
        self._snapshot: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._legs)

    @property
    def num_context(self) -> int:
        """The sum of all sequences' lengths, in tokens."""
        return int(self._columns[_NUM, : len(self._legs)].sum())

    def join(self, sequence: Running) -> None:
        """Let the sequence draw from the next step on.

        The sequence must be shorter than the model's maximum length.
        """
        model, at = self._model, sequence.num_tokens
        state = sequence.state + (sequence.last + 1) * int(model.state_weights[at]) & MASK
        digest = sequence.digest + mix(state) * int(model.token_gain[at]) & MASK
        limit = model.params.max_model_len - at - 1
        column = len(self._legs)
        self._columns[:, column] = np.array(
            [
                state,
                digest,
                sequence.key,
                sequence.last,
                at + 1,
                min(sequence.max_tokens, limit),
                not sequence.ignore_eos,
                0,
                sequence.min_tokens,
            ],
            np.uint64,
        )
        self._legs.append(sequence.leg)
        self._column_of[sequence.leg] = column
        self._snapshot = tuple(self._legs)
        stops = sequence.stop_token_ids - {EOS_ID}
        if stops:
            self._stops[sequence.leg] = stops
        if sequence.guide is not None:
            self._guides[sequence.leg] = sequence.guide

    def leave(self, leg: int) -> npt.NDArray[np.uint32]:
        """Remove a sequence. Returns the tokens that it drew here."""
        column, end = self._column_of.pop(leg), len(self._legs) - 1
        drawn = self._history[column, : int(self._columns[_DRAWN, column])].copy()
        if column != end:
            self._columns[:, column] = self._columns[:, end]
            count = int(self._columns[_DRAWN, end])
            self._history[column, :count] = self._history[end, :count]
            self._legs[column] = self._legs[end]
            self._column_of[self._legs[column]] = column
        self._legs.pop()
        self._stops.pop(leg, None)
        self._guides.pop(leg, None)
        self._snapshot = tuple(self._legs)
        return drawn

    def __contains__(self, leg: int) -> bool:
        return leg in self._column_of

    def step(self) -> BatchStep:
        """Draw one token for each sequence. A finished sequence stays until `leave`."""
        count = len(self._legs)
        columns = self._columns[:, :count]
        is_long_enough = columns[_MIN_LEFT] == 0
        may_end = is_long_enough & (columns[_MAY_END] > 0)
        tokens = self._model.draw(columns[_DIGEST], columns[_KEY], columns[_LAST], may_end)
        failed = self._draw_guided(columns, tokens, may_end) if self._guides else ()
        self._append(columns, tokens)
        columns[_MIN_LEFT] -= ~is_long_enough
        token_ids: list[int] = tokens.tolist()
        # Before `min_tokens`, EOS is drawn only if a constraint allows no other token. Even then
        # EOS ends the answer.
        stops = (tokens == EOS_ID) & (columns[_MAY_END] > 0)
        for leg, stop_ids in self._stops.items():
            column = self._column_of[leg]
            if is_long_enough[column] and token_ids[column] in stop_ids:
                stops[column] = True
        return BatchStep(self._snapshot, token_ids, self._finished(columns, stops, failed), failed)

    def _draw_guided(
        self, columns: Words, tokens: Words, may_end: npt.NDArray[np.bool_]
    ) -> list[int]:
        """Replace the tokens of sequences with a constraint. Returns the legs that failed."""
        failed: list[int] = []
        for leg, guide in self._guides.items():
            at = self._column_of[leg]
            try:
                seed = int(columns[_DIGEST, at]) + int(columns[_KEY, at])
                token, may = int(tokens[at]), bool(may_end[at])
                tokens[at] = guided_vocabulary().draw_next(guide, token, seed, may)
            except EngineFailed:
                failed.append(leg)
        return failed

    def _append(self, columns: Words, tokens: Words) -> None:
        """Add the drawn tokens to the digests, as if their KV were intact in memory."""
        model, count = self._model, columns.shape[1]
        self._history[np.arange(count), columns[_DRAWN]] = tokens
        at = columns[_NUM]
        columns[_STATE] += (tokens + _ONE) * model.state_weights[at]
        columns[_DIGEST] += mix_words(columns[_STATE]) * model.token_gain[at]
        columns[_LAST] = tokens
        columns[_NUM] += _ONE
        columns[_DRAWN] += _ONE
        columns[_LEFT] -= _ONE

    def _finished(
        self, columns: Words, stops: npt.NDArray[np.bool_], failed: Sequence[int]
    ) -> list[tuple[int, FinishReason]]:
        ended = stops | (columns[_LEFT] == 0)
        if not ended.any():
            return []
        return [
            (self._legs[c], FinishReason.STOP if stops[c] else FinishReason.LENGTH)
            for c in np.flatnonzero(ended).tolist()
            if self._legs[c] not in failed
        ]
