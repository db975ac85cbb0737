"""Decides which blocks of a prompt each layer still needs: all, or only those of a window.

A window is the number of last tokens to which a layer attends.

Layers that need the same share of a text form a cache group. For each request, an engine keeps one
list of block ids per group. Position i of every list is block i of the prompt. An entry is null if
its block has left the group's window.

Some layers have a state instead of K and V: linear attention, state space, short convolution. A
block of their group holds the state after the block's last token, so the next token needs only the
last block. The layout treats this as a window of two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NULL_BLOCK: Final = 0  # the id of an entry whose block has left its group's window
STATE_WINDOW: Final = 2  # tokens: with this window, only the last block is needed
BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by cache group."""
BlockLists = Sequence[Sequence[int]]
"""A request's block ids by cache group, from the request's first block on."""


def first_needed(num_tokens: int, window: int, block_size: int) -> int:
    """The first block that the token after `num_tokens` sees in a layer.

    A token sees `window` tokens, itself included. With `window` 0, it sees all tokens.
    """
    return max(0, num_tokens - window + 1) // block_size if window else 0


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The cache groups of a model. `windows` has the window of each group, 0 for all tokens."""

    block_size: int
    windows: tuple[int, ...] = (0,)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def first_full(self) -> int:
        """The first group without a window, or else the first group."""
        return self.windows.index(0) if 0 in self.windows else 0

    def states(self, ids: BlockIds) -> BlockIds:
        """The ids of groups whose layers have a state. The other groups get an empty tuple."""
        return tuple(
            each if window == STATE_WINDOW else ()
            for each, window in zip(ids, self.windows, strict=True)
        )

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """By group, the first block that the token after `num_tokens` needs."""
        return tuple(first_needed(num_tokens, w, self.block_size) for w in self.windows)

    def needed(self, lists: BlockLists, num_tokens: int, first: int, end: int) -> BlockIds:
        """Of the blocks `first` to `end - 1`, the ids that the next token needs, by group.

        `num_tokens` is the number of tokens before the next token.
        """
        starts = (max(first, needed) for needed in self.first_blocks(num_tokens))
        return tuple(tuple(ids[s:end]) for ids, s in zip(lists, starts, strict=True))


def kv_bytes(
    num_tokens: int, block_size: int, block_bytes: int, windows: Sequence[int] = ()
) -> int:
    """The bytes of KV that are sent for a prompt.

    `block_bytes` is the size of a block over all layers. `windows` are by layer. Without `windows`,
    every layer needs all tokens.
    """
    num_blocks = -(-num_tokens // block_size)
    if not windows:
        return num_blocks * block_bytes
    kept = (num_blocks - first_needed(num_tokens, w, block_size) for w in windows)
    return sum(kept) * (block_bytes // len(windows))
