"""What two engines must have in common to exchange KV, as one short string, and in words where they differ (S126).

The string is the `model_fingerprint` of tickets, registry and index: equal strings may exchange, others must
not. It names the number of ranks only where blocks are opaque: those that can be cut by heads meet whatever the
numbers (`reslice`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNSCALED = "unscaled"
BY_HEADS = "heads"

_TEXT = re.compile(
    r"(?P<model>[0-9a-z]+)\.(?P<dtype>\w+)\.(?P<scales>[\w-]+)\.b(?P<block_size>\d+)"
    r"\.(?P<block>[0-9a-z]+)\.(?:heads|tp(?P<num_ranks>\d+))"
)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """`num_ranks` 0 says that any number may meet."""

    model: str  # digest of the weights, of how they are computed with, and of the engine's version
    dtype: str  # of the stored K and V
    scales: str  # how they are scaled: unscaled, per-tensor-<digest of the values>, per-token-head
    block_size: int  # tokens
    block: str  # digest of a block's inside as it travels
    num_ranks: int

    def __str__(self) -> str:
        ranks = f"tp{self.num_ranks}" if self.num_ranks else BY_HEADS
        return f"{self.model}.{self.dtype}.{self.scales}.b{self.block_size}.{self.block}.{ranks}"

    @property
    def kv(self) -> str:
        return f"{self.dtype} ({self.scales})"


def parse(text: str) -> KvFormat | None:
    """None for a string that another kind of engine made."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    return KvFormat(
        found["model"],
        found["dtype"],
        found["scales"],
        int(found["block_size"]),
        found["block"],
        int(found["num_ranks"] or 0),
    )


def difference(theirs: str, ours: str, them: str = "the sender", us: str = "this instance") -> str:
    """Why a ticket of `theirs` cannot be used where `ours` holds, naming both; empty if it can."""
    if theirs == ours:
        return ""
    a, b = parse(theirs), parse(ours)
    if a is None or b is None:
        return f"{them} runs another engine or model than {us}: {theirs} and {ours}"
    if (a.dtype, a.scales) != (b.dtype, b.scales):
        return f"{them} keeps its KV as {a.kv}, {us} as {b.kv}"
    if a.model != b.model:
        return f"{them} runs another model, number format or engine version than {us}"
    if a.block_size != b.block_size:
        return f"{them} has blocks of {a.block_size} tokens, {us} of {b.block_size}"
    if a.num_ranks != b.num_ranks:
        return (
            f"{them} splits its KV over {_ranks(a)}, {us} over {_ranks(b)}, and the inside of their "
            "blocks is the kernel's own: it cannot be cut by heads"
        )
    return f"{them} packs its blocks in another way than {us}"


def _ranks(kind: KvFormat) -> str:
    return f"{kind.num_ranks} rank{'s' * (kind.num_ranks > 1)}" if kind.num_ranks else "heads"
