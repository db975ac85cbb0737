"""The sim model's draws under a constraint, which is a grammar for the answer.

A guide follows the answer and decides which tokens the constraint allows next. The sim model has no
logits, so it draws one of these tokens. Preferences among these tokens make sure that strings,
lists and the answer end. A draw depends only on the digest of the KV, the draw key, the request's
limits on tokens and the state of the constraint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from pdmesh.engine.grammars.guide import Guide
from pdmesh.engine.sim.model import MASK, mix
from pdmesh.engine.sim.vocabulary import EOS_ID, SPECIALS, Vocabulary, build_vocabulary
from pdmesh.errors import EngineFailed

Flags = npt.NDArray[np.bool_]

_CLOSERS: Final = (b'"', b"}", b"]", b">", b")")


@dataclass(frozen=True, slots=True)
class LimitedGuide:
    """A guide, and the client's `allowed_token_ids`, which apply while the guide constrains.

    If `allowed_token_ids` is empty, any token may be drawn that the guide allows.
    """

    guide: Guide
    allowed_token_ids: tuple[int, ...] = ()


class GuidedVocabulary:
    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [b"" for _ in SPECIALS] + vocabulary.tokens
        self._size = vocabulary.size
        self._closers = np.array([token in _CLOSERS for token in tokens])
        self._words = np.zeros(self._size, np.bool_)
        self._words[vocabulary.drawable] = True
        self._visible = np.array([bool(token.strip()) for token in tokens])

    def draw_next(self, limited: LimitedGuide, free: int, seed: int, may_end: bool) -> int:
        """Draw the next token and pass it to the guide.

        `free` is the token that is drawn while the guide constrains nothing. Raises EngineFailed if
        the constraint allows no token or has become too complex.
        """
        guide = limited.guide
        token = free if guide.is_free else self._draw(limited, mix(seed & MASK), may_end)
        guide.accept([token])
        return token

    def _draw(self, limited: LimitedGuide, drawn: int, may_end: bool) -> int:
        """Draw an allowed token.

        If EOS is allowed, half of the draws choose EOS. If not, a quarter of the draws prefers
        tokens that close a string or a list. All other draws prefer words.
        """
        allowed = self._allowed(limited.guide)
        if limited.allowed_token_ids:
            others = np.ones(self._size, np.bool_)
            others[[i for i in limited.allowed_token_ids if i < self._size]] = False
            allowed[others] = False
        if not allowed.any():
            raise EngineFailed("the answer's constraint allows no token")
        if not may_end and allowed.sum() > 1:
            allowed[EOS_ID] = False
        share, drawn = drawn & 3, drawn >> 8
        if allowed[EOS_ID] and share < 2:
            return EOS_ID
        order = (self._words, self._visible) if share else (self._closers, self._visible)
        for preferred in order:
            if (found := np.flatnonzero(allowed & preferred)).size:
                return int(found[drawn % found.size])
        found = np.flatnonzero(allowed)
        return int(found[drawn % found.size])

    def _allowed(self, guide: Guide) -> Flags:
        mask = guide.matcher.compute_bitmask()
        if guide.matcher.is_error():
            raise EngineFailed("the answer's constraint is too complex to go on")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return bits[: self._size].astype(np.bool_)


@cache
def guided_vocabulary() -> GuidedVocabulary:
    return GuidedVocabulary(build_vocabulary())
