"""Decides whether two engines may exchange KV, and says in words where they differ (S126).

All that the engines must have in common is in one short string, the `model_fingerprint`. It is in
the registry, in the index, and in each ticket, which is the right to pull KV. Engines may exchange
KV only if their strings are equal. If blocks can be cut by heads, the string has the number of
heads, and the engines may have different numbers of ranks (`rank_heads.py`). If blocks are opaque
bytes, the string has the number of ranks. If the layers are split over pipeline stages, the string
has the number of layers of each stage (`rank_place.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdmesh.core.kv.layout.rank_heads import heads_of

UNSCALED = "unscaled"

_TEXT = re.compile(
    r"(?P<model>[0-9a-z]+)\.(?P<dtype>\w+)\.(?P<scales>[\w-]+)\.b(?P<block_size>\d+)"
    r"\.(?P<block>[0-9a-z]+)\.(?P<cut>heads|tp)(?P<count>\d+)"
    r"(\.pp(?P<stages>[1-9]\d*(-[1-9]\d*)+))?"
)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Everything that two engines must have in common to exchange KV.

    If blocks can be cut by heads, `num_heads` counts the heads of the whole model, and `num_ranks`
    is 0. For opaque blocks, `num_ranks` counts the ranks of one pipeline stage, and `num_heads` is
    0.
    """

    model: str  # digest of the weights, of how they are used, and of the engine's version
    dtype: str  # type of the stored K and V
    scales: str  # unscaled, per-tensor-<digest of the values>, or per-token-head
    block_size: int  # tokens
    block: str  # digest of a block's layout in a transfer
    num_ranks: int = 0
    num_heads: int = 0
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; empty if there is only one stage

    def __str__(self) -> str:
        cut = f"heads{self.num_heads}" if self.num_heads else f"tp{self.num_ranks}"
        if self.stages:
            cut += f".pp{'-'.join(map(str, self.stages))}"
        return f"{self.model}.{self.dtype}.{self.scales}.b{self.block_size}.{self.block}.{cut}"

    @property
    def num_stages(self) -> int:
        return len(self.stages) or 1

    @property
    def kv(self) -> str:
        return f"{self.dtype} ({self.scales})"


def parse(text: str) -> KvFormat | None:
    """The format in a fingerprint, or None if another kind of engine made the fingerprint."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    count, is_cut = int(found["count"]), found["cut"] == "heads"
    return KvFormat(
        found["model"],
        found["dtype"],
        found["scales"],
        int(found["block_size"]),
        found["block"],
        num_ranks=0 if is_cut else count,
        num_heads=count if is_cut else 0,
        stages=tuple(map(int, found["stages"].split("-"))) if found["stages"] else (),
    )


def may_meet(fingerprint: str, our_ranks: int, their_ranks: int) -> bool:
    """Whether two instances with this fingerprint and these numbers of ranks may exchange KV."""
    return rank_bytes(fingerprint, 0, our_ranks, their_ranks) is not None


def rank_bytes(fingerprint: str, our_bytes: int, our_ranks: int, their_ranks: int) -> int | None:
    """The bytes of a prompt on each of their ranks, if each of our ranks has `our_bytes`.

    None means that the two engines cannot exchange KV. In a pipeline, both numbers are for a rank
    of the stage that has the most layers.
    """
    if our_ranks == their_ranks:
        return our_bytes
    kind = parse(fingerprint)
    if kind is None or not kind.num_heads:
        return None
    if our_ranks % kind.num_stages or their_ranks % kind.num_stages:
        return None
    try:
        ours = heads_of(kind.num_heads, our_ranks // kind.num_stages, 0).count
        theirs = heads_of(kind.num_heads, their_ranks // kind.num_stages, 0).count
    except ValueError:
        return None
    return our_bytes // ours * theirs


def all_bytes(fingerprint: str, largest_bytes: int, num_ranks: int) -> int:
    """A prompt's bytes over all ranks, if a rank of the largest stage has `largest_bytes`."""
    kind = parse(fingerprint)
    if kind is None or not kind.stages:
        return largest_bytes * num_ranks
    num_beside = num_ranks // kind.num_stages
    return largest_bytes // max(kind.stages) * sum(kind.stages) * num_beside


def difference(theirs: str, ours: str, them: str = "the sender", us: str = "this instance") -> str:
    """Why an engine of fingerprint `ours` cannot use KV of `theirs`. Empty if it can.

    The text calls the two sides `us` and `them`.
    """
    if theirs == ours:
        return ""
    a, b = parse(theirs), parse(ours)
    if a is None or b is None:
        return f"{them} runs another engine or model than {us}: {theirs} and {ours}"
    if (a.dtype, a.scales) != (b.dtype, b.scales):
        return f"{them} keeps its KV as {a.kv}, {us} as {b.kv}"
    if a.model != b.model:
        return f"{them} runs another model, draft, number format or engine version than {us}"
    if a.block_size != b.block_size:
        return f"{them} has blocks of {a.block_size} tokens, {us} of {b.block_size}"
    if a.stages != b.stages:
        return (
            f"{them} is {_pipeline(a)}, {us} {_pipeline(b)}: both need the same "
            "pipeline_parallel_size, and the same layers on each stage"
        )
    if bool(a.num_heads) != bool(b.num_heads):
        return (
            f"{them} keeps {_cut(a)}, {us} {_cut(b)}: they run other releases of pdmesh or "
            "other attention kernels"
        )
    if (a.num_ranks, a.num_heads) != (b.num_ranks, b.num_heads):
        return (
            f"{them} keeps {_cut(a)}, {us} {_cut(b)}: opaque blocks cannot be cut by heads, so "
            "both need the same number of ranks"
        )
    return f"{them} packs its blocks in another way than {us}"


def _pipeline(kind: KvFormat) -> str:
    if not kind.stages:
        return "no pipeline"
    return f"a pipeline of {' + '.join(map(str, kind.stages))} layers"


def _cut(kind: KvFormat) -> str:
    if kind.num_heads:
        return f"its KV by {kind.num_heads} heads"
    return f"opaque blocks on {kind.num_ranks} rank{'s' * (kind.num_ranks > 1)}"
