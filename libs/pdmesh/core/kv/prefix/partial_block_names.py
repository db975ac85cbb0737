"""Names the beginning of a block: sampled prefix hashing, for the tail of a conversation (S103).

A block's full name stands for all of its tokens. But the last block of a prompt is seldom full, and
two conversations seldom part at a block's end. So beginnings have names, too: one at `start` tokens
and one after each further `step` tokens, as far as there are tokens. A beginning of fewer than
`start` tokens has one name, at its end (RTP-LLM 5.2.3: 208 and 4). A name is keyed and chained like
a full block's name (ADR 0003), with its own personalisation, so that the two are never equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES

_PERSON: Final = b"pdmesh tail"
_TOKEN_BYTES: Final = 4
_NO_PARENT: Final = bytes(HASH_BYTES)
_MAX_SUFFIX: Final = 16  # tokens a template puts after the last turn


@dataclass(frozen=True, slots=True)
class PartialSampling:
    """Where the beginnings of a block are named. `step` 0: nowhere."""

    start: int = 208
    step: int = 4

    def __bool__(self) -> bool:
        return self.step > 0

    def positions(self, num_tokens: int) -> Sequence[int]:
        """The numbers of tokens at which a block that holds `num_tokens` has a name."""
        if not self or num_tokens <= 0:
            return ()
        if num_tokens < self.start:
            return (num_tokens,)
        return range(self.start, num_tokens + 1, self.step)


NO_PARTIALS: Final = PartialSampling(step=0)


def partial_names(
    root: bytes, parent: bytes, data: bytes | memoryview, positions: Collection[int]
) -> dict[int, bytes]:
    """The name at each of `positions` (ascending) of a block's tokens.

    `data` has each token as a little-endian uint32. `root` and `parent` are as in `block_hashes`;
    without a parent the prompt begins with this block.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES, key=root, person=_PERSON)
    digest.update(parent or _NO_PARENT)
    names: dict[int, bytes] = {}
    done = 0
    for position in positions:
        end = position * _TOKEN_BYTES
        digest.update(data[done:end])
        names[position] = digest.copy().digest()
        done = end
    return names


@dataclass(frozen=True, slots=True)
class PartialBlockName:
    """The name of `num_tokens` tokens after `num_blocks` full blocks of a prompt."""

    num_blocks: int
    num_tokens: int
    name: bytes


def turn_ends(data: bytes, stop_token_ids: Collection[int], max_ends: int = 4) -> list[int]:
    """Where earlier turns of a conversation may have left KV: positions in the prompt, last first.

    A prompt ends with what its template puts after the last turn: a stop token and a few more
    tokens. Where the same tokens stand earlier, an earlier prompt of this conversation ended. Its
    answer ended at the first stop token after them. A prompt without a stop token near its end is
    no conversation and has no such positions.
    """
    num_tokens = len(data) // _TOKEN_BYTES
    suffix = _suffix(data, num_tokens, stop_token_ids)
    ends: list[int] = []
    at = num_tokens - len(suffix) // _TOKEN_BYTES
    while suffix and len(ends) < max_ends:
        found = _find_before(data, suffix, at)
        if found is None:
            break
        end = found + len(suffix) // _TOKEN_BYTES
        answer_end = _next_stop(data, end, at, stop_token_ids)
        if answer_end is not None:
            ends.append(answer_end)
        ends.append(end)
        at = found
    return ends[:max_ends]


def _token(data: bytes, index: int) -> int:
    return int.from_bytes(data[index * _TOKEN_BYTES : (index + 1) * _TOKEN_BYTES], "little")


def _suffix(data: bytes, num_tokens: int, stop_token_ids: Collection[int]) -> bytes:
    """The tokens from the last stop token on; empty if that is not near the end."""
    for index in range(num_tokens - 1, max(-1, num_tokens - 1 - _MAX_SUFFIX), -1):
        if _token(data, index) in stop_token_ids:
            return data[index * _TOKEN_BYTES :]
    return b""


def _find_before(data: bytes, wanted: bytes, before: int) -> int | None:
    """The last token index before `before` at which `wanted` stands."""
    end = before * _TOKEN_BYTES + len(wanted) - 1
    while (found := data.rfind(wanted, 0, end)) >= 0:
        if found % _TOKEN_BYTES == 0:
            return found // _TOKEN_BYTES
        end = found + len(wanted) - 1
    return None


def _next_stop(data: bytes, begin: int, end: int, stop_token_ids: Collection[int]) -> int | None:
    """The first stop token at or after `begin`."""
    found = []
    for stop in stop_token_ids:
        wanted, at = stop.to_bytes(_TOKEN_BYTES, "little"), begin * _TOKEN_BYTES
        while (at := data.find(wanted, at, end * _TOKEN_BYTES)) >= 0 and at % _TOKEN_BYTES:
            at += 1
        if at >= 0:
            found.append(at // _TOKEN_BYTES)
    return min(found, default=None)
