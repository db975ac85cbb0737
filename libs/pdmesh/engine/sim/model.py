"""The simulated engine's model: tokens decide the KV bytes, and the KV bytes decide the next token.

Each token has a state: a weighted sum over the token and all tokens before it. The token's KV
consists of words that are computed from the mixed state. The next token is drawn from a digest of
all KV words. All sums are mod 2^64 with odd weights. So a single wrong byte of KV changes the
digest, and with it the rest of the text, except for tokens that the vocabulary forces. A new token
updates the digest in O(1).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.vocabulary import EOS_ID, Vocabulary, build_vocabulary

Words = npt.NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
_C1, _C2, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SimParams:
    """The sim model's parameters.

    Two instances agree on outputs and KV bytes only if all parameters are equal.
    """

    seed: int = 1
    block_size: int = 64  # tokens
    num_layers: int = 2
    token_bytes: int = 64  # KV bytes per token and layer; a multiple of 8
    max_model_len: int = 4096
    eos_period: int = 300  # a draw is EOS with probability 1 / eos_period; 0: never

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in one layer."""
        return self.block_size * self.token_bytes


def mix(x: int) -> int:
    """splitmix64's finaliser: every bit of the result depends on every bit of `x`."""
    x = ((x ^ (x >> 30)) * _C1) & MASK
    x = ((x ^ (x >> 27)) * _C2) & MASK
    return x ^ (x >> 31)


_S30, _S27, _S31, _S33 = (np.uint64(n) for n in (30, 27, 31, 33))
_N1, _N2 = np.uint64(_C1), np.uint64(_C2)
_ONE: Final = np.uint64(1)


def mix_words(x: Words) -> Words:
    """`mix` of each element, in a new array."""
    x = (x ^ (x >> _S30)) * _N1
    x = (x ^ (x >> _S27)) * _N2
    return x ^ (x >> _S31)


def draw_key(sampling: Sampling, random_seed: int) -> int:
    """The number that a draw adds to the digest, made from the sampling parameters.

    The number is 0 for a greedy draw without shaping. The sim model has no logits to shape, so the
    shaping changes this key instead. An instance that loses the shaping then draws another text,
    which tests notice.
    """
    key = 0 if sampling.shaping is UNSHAPED else _shaping_key(sampling.shaping)
    if sampling.temperature == 0:
        return key
    seed = random_seed if sampling.seed is None else sampling.seed
    return key ^ mix(seed * 2 + 1 & MASK) ^ mix(int(sampling.temperature * 1e6))


def _shaping_key(shaping: LogitShaping) -> int:
    unlimited = replace(shaping, min_tokens=0)  # `may_end` of a draw enforces `min_tokens`
    if unlimited == UNSHAPED:
        return 0
    return int.from_bytes(hashlib.blake2b(repr(unlimited).encode(), digest_size=8).digest())


def tokens_of(prompt: array[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.uint32]:
    """The prompt's tokens as the model sees them: words of the digest replace an image's tokens."""
    tokens = np.frombuffer(prompt, np.uint32)
    if not images:
        return tokens
    seen = tokens.copy()
    for image in images:
        words = np.frombuffer(image.digest, "<u4")
        seen[image.position : image.position + image.num_tokens] = np.resize(
            words, image.num_tokens
        )
    return seen


def shift_of(adapter: Adapter | None) -> int:
    """The amount that the adapter adds to every state of a sequence, or 0 without an adapter."""
    return 0 if adapter is None else int(adapter.digest[:16], 16) | 1


@dataclass(frozen=True)
class SimModel:
    """Computes states, KV, digests and draws. The weights are computed once."""

    params: SimParams

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return build_vocabulary()

    @cached_property
    def _draw_tables(self) -> tuple[Words, Words]:
        """The ids that can be drawn, and for each id the id that must follow it, or 0."""
        vocabulary = self._vocabulary
        follow = np.zeros(vocabulary.size, np.uint64)
        follow[list(vocabulary.follow)] = list(vocabulary.follow.values())
        return np.array(vocabulary.drawable, np.uint64), follow

    def _weights(self, salt: int, count: int) -> Words:
        start = mix(self.params.seed ^ salt)
        counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
        return mix_words(counter) | np.uint64(1)

    @cached_property
    def state_weights(self) -> Words:
        """The weight of each position's token, in its own state and in all later states."""
        return self._weights(1, self.params.max_model_len)

    @cached_property
    def position_weights(self) -> Words:
        """The weight of each position's KV in the digest."""
        return self._weights(2, self.params.max_model_len)

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return self.params.num_layers, self.params.token_bytes // 8

    @cached_property
    def makers(self) -> Words:
        """[layer, word]: the factors that turn a token's mixed state into the token's KV words."""
        layers, words = self._shape
        return self._weights(3, layers * words).reshape(layers, words)

    @cached_property
    def readers(self) -> Words:
        """[layer, word]: the weight of a token's KV word in the digest."""
        layers, words = self._shape
        return self._weights(4, layers * words).reshape(layers, words)

    @cached_property
    def token_gain(self) -> Words:
        """The factor of a position's mixed state in the digest, if the position's KV is intact."""
        gain = np.sum(self.makers * self.readers, dtype=np.uint64)
        weighted: Words = self.position_weights * gain
        return weighted

    def states(self, token_ids: npt.NDArray[np.uint32], shift: int = 0) -> Words:
        """The state after each token, shape [num_tokens]. An adapter adds `shift` to each state."""
        terms = (token_ids.astype(np.uint64) + _ONE) * self.state_weights[: len(token_ids)]
        states: Words = np.cumsum(terms, dtype=np.uint64)
        return states + np.uint64(shift) if shift else states

    def last_state(self, token_ids: npt.NDArray[np.uint32], shift: int = 0) -> int:
        """The state after the last token, computed without the other states."""
        weights = self.state_weights[: len(token_ids)]
        return int(np.dot(token_ids.astype(np.uint64) + _ONE, weights)) + shift & MASK

    def kv_words(self, states: Words, layers: slice) -> Words:
        """KV of tokens in some layers, shape [layers, num_tokens, token_bytes / 8]."""
        words: Words = mix_words(states)[None, :, None] * self.makers[layers, None, :]
        return words

    def digest(self, words: Words) -> int:
        """The digest of a sequence's KV from position 0 on.

        `words` has the shape [layer, num_tokens, token_bytes / 8].
        """
        per_token = (words @ self.readers[:, :, None])[:, :, 0]
        return int((per_token @ self.position_weights[: words.shape[1]]).sum(dtype=np.uint64))

    def draw(
        self, digests: Words, keys: Words, last: Words, may_end: npt.NDArray[np.bool_]
    ) -> Words:
        """The next token of each sequence.

        It depends on the digest, the draw key, the last token and whether EOS is allowed.
        """
        drawable, follow = self._draw_tables
        drawn = mix_words(digests + keys)
        tokens = drawable[drawn % np.uint64(len(drawable))]
        if self.params.eos_period:
            ends = ((drawn >> _S33) % np.uint64(self.params.eos_period) == 0) & may_end
            tokens = np.where(ends, np.uint64(EOS_ID), tokens)
        forced = follow[np.where(last < np.uint64(len(follow)), last, np.uint64(0))]
        result: Words = np.where(forced > 0, forced, tokens)
        return result

    def draw_one(self, digest: int, key: int, last: int, may_end: bool) -> int:
        """`draw` for one sequence, in plain integers."""
        vocabulary, period = self._vocabulary, self.params.eos_period
        if (forced := vocabulary.follow.get(last)) is not None:
            return forced
        drawn = mix(digest + key & MASK)
        if may_end and period and (drawn >> 33) % period == 0:
            return EOS_ID
        return vocabulary.drawable[drawn % len(vocabulary.drawable)]
