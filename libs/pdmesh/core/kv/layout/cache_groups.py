"""Which blocks of a prompt each layer still needs: all, or those of a window of the last tokens.

Layers that need the same share of a text form a cache group. An engine keeps a block list for each
group of a request. A prompt's blocks have the same numbers in all lists, but an entry that has left
the group's window is null.

Layers with a state (linear attention, state space, short convolution) keep one block for all the
tokens before it: a block of their group is the state after the last token that it covers. So the
next token needs the last block alone. To the layout that is a window of two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NULL_BLOCK: Final = 0  # the id of an entry that has left its group's window
STATE_WINDOW: Final = 2  # tokens: the last block has what the next token needs of a state
BlockIds = tuple[tuple[int, ...], ...]
"""Ids by cache group."""
BlockLists = Sequence[Sequence[int]]
"""A request's ids by cache group, from its first block on."""


def first_needed(num_tokens: int, window: int, block_size: int) -> int:
    """The first block that the token after `num_tokens` sees in a layer; `window` 0: no window.

    A token sees `window` tokens, itself included.
    """
    return max(0, num_tokens - window + 1) // block_size if window else 0


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model: `windows` by group, in tokens; 0: its layers need all tokens."""

    block_size: int
    windows: tuple[int, ...] = (0,)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def first_full(self) -> int:
        """The first group without a window, or else the first group."""
        return self.windows.index(0) if 0 in self.windows else 0

    def states(self, ids: BlockIds) -> BlockIds:
        """Only the ids of groups whose layers keep a state."""
        return tuple(
            each if window == STATE_WINDOW else ()
            for each, window in zip(ids, self.windows, strict=True)
        )

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """By group: which block is the first that the token after `num_tokens` needs."""
        return tuple(first_needed(num_tokens, w, self.block_size) for w in self.windows)

    def needed(self, lists: BlockLists, num_tokens: int, first: int, end: int) -> BlockIds:
        """The ids of blocks `first` to `end - 1`, if the token after `num_tokens` needs them."""
        starts = (max(first, needed) for needed in self.first_blocks(num_tokens))
        return tuple(tuple(ids[s:end]) for ids, s in zip(lists, starts, strict=True))


def kv_bytes(
    num_tokens: int, block_size: int, block_bytes: int, windows: Sequence[int] = ()
) -> int:
    """The bytes of a prompt that travel. `block_bytes` are of one block over all layers.

    `windows` are by layer; without them, every layer needs all tokens.
    """
    num_blocks = -(-num_tokens // block_size)
    if not windows:
        return num_blocks * block_bytes
    kept = (num_blocks - first_needed(num_tokens, w, block_size) for w in windows)
    return sum(kept) * (block_bytes // len(windows))
