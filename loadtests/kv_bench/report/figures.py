"""Computes figures from rows: medians with spread, and ratios of two modes within the same
round.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loadtests.kv_bench import cases
from loadtests.kv_bench.rounds import Row

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BAR_TOTAL: Final = 0.54  # as a share of the time of a transfer block by block
BAR_WIRE: Final = 0.95  # as a share of ucx_perftest's rate
BAR_VISIBLE: Final = 0.35  # as a share of the time that is visible in whole-model mode
BAR_NIXL: Final = 1.0
WIRE_BAR_FROM: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))


class Figures:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.transports = list(dict.fromkeys(row.transport for row in rows))
        self.sizes = sorted({row.num_bytes for row in rows})
        self.modes = list(dict.fromkeys(row.mode for row in rows))
        self._by_cell: dict[tuple[str, int, str], dict[int, list[Row]]] = {}
        for row in rows:
            cell = self._by_cell.setdefault((row.transport, row.num_bytes, row.mode), {})
            cell.setdefault(row.round, []).append(row)

    def per_round(
        self, transport: str, num_bytes: int, mode: str, column: str = "total_ms"
    ) -> dict[int, float]:
        """The median of each round's measurements."""
        cell = self._by_cell.get((transport, num_bytes, mode), {})
        found = {n: [getattr(r, column) for r in rows] for n, rows in cell.items()}
        return {n: statistics.median(v) for n, v in found.items() if None not in v}

    def spread(
        self, transport: str, num_bytes: int, mode: str, column: str = "total_ms"
    ) -> Spread | None:
        return Spread.of(list(self.per_round(transport, num_bytes, mode, column).values()))

    def ratio(
        self,
        transport: str,
        num_bytes: int,
        mode: str,
        of_modes: Sequence[str],
        column: str = "total_ms",
        of_column: str = "",
    ) -> Spread | None:
        """`mode` divided by the best of `of_modes` in the same round.

        `of_column` is the column of `of_modes` if it differs from `column`.
        """
        ours = self.per_round(transport, num_bytes, mode, column)
        of_column = of_column or column
        others = [self.per_round(transport, num_bytes, other, of_column) for other in of_modes]
        ratios = []
        for number, value in ours.items():
            best = min((other[number] for other in others if number in other), default=0.0)
            if best:
                ratios.append(value / best)
        return Spread.of(ratios)

    def perftest_rate(self, transport: str, num_bytes: int, wait: str) -> Spread | None:
        """Our payload's rate as a share of perftest's. perftest polls or sleeps, as `wait` says.

        perftest never writes the memory that it sends. So it reads a single page of zeros from the
        processor's cache. Mode WIRE_EMPTY sends the same kind of memory, so its rate is compared
        here.
        """
        slower = self.ratio(transport, num_bytes, cases.WIRE_EMPTY, (f"perftest_{wait}",))
        return slower and Spread(1 / slower.median, 1 / slower.high, 1 / slower.low)


def _against_nixl(
    figures: Figures, transport: str, num_bytes: int, *, mode: str, column: str, kind: str
) -> Spread | None:
    """Our column divided by nixl's total time.

    nixl's transfer begins when prefill is over, so all of its time is visible.
    """
    return figures.ratio(transport, num_bytes, mode, (f"nixl_{kind}",), column, "total_ms")


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    limit: str
    value: Callable[[Figures, str, int], Spread | None]
    is_met: Callable[[float], bool]


BARS: Final = (
    Bar(
        "block-free, whole model / block by block",
        f"<= {BAR_TOTAL}",
        lambda f, t, n: f.ratio(t, n, cases.CHUNKED, [cases.BLOCKS_ACKED]),
        lambda v: v <= BAR_TOTAL,
    ),
    Bar(
        "block-free, layer by layer / block by block",
        f"<= {BAR_TOTAL}",
        lambda f, t, n: f.ratio(t, n, cases.LAYERS, [cases.BLOCKS_ACKED]),
        lambda v: v <= BAR_TOTAL,
    ),
    Bar(
        "rate of the wire / ucx_perftest, asleep until there is work, as ours is",
        f">= {BAR_WIRE} from 16 MiB",
        lambda f, t, n: f.perftest_rate(t, n, "sleep") if n >= WIRE_BAR_FROM else None,
        lambda v: v >= BAR_WIRE,
    ),
    Bar(
        "rate of the wire / ucx_perftest, polling a core each without end",
        f">= {BAR_WIRE} from 16 MiB",
        lambda f, t, n: f.perftest_rate(t, n, "poll") if n >= WIRE_BAR_FROM else None,
        lambda v: v >= BAR_WIRE,
    ),
    Bar(
        "visible after prefill: layer by layer / whole model",
        f"<= {BAR_VISIBLE}",
        lambda f, t, n: f.ratio(t, n, cases.LAYERS_COMPUTED, [cases.WHOLE_COMPUTED], "visible_ms"),
        lambda v: v <= BAR_VISIBLE,
    ),
    *(
        Bar(
            f"{label} / nixl, {what}",
            f"<= {BAR_NIXL:g}",
            partial(_against_nixl, mode=mode, column=column, kind=kind),
            lambda v: v <= BAR_NIXL,
        )
        for label, mode, column in (
            ("visible after prefill: layer by layer", cases.LAYERS_COMPUTED, "visible_ms"),
            ("block-free, whole model", cases.CHUNKED, "total_ms"),
        )
        for kind, what in (
            ("checked", "told and checked as ours"),
            ("told", "told that it is there"),
            ("blocks", "which knows by itself"),
        )
    ),
)


def write_csv(rows: Sequence[DataclassInstance], path: Path) -> None:
    """Write rows of one class. There must be at least one row."""
    names = [field.name for field in fields(rows[0])]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            cells = asdict(row)
            writer.writerow(
                {n: round(v, 4) if isinstance(v, float) else v for n, v in cells.items()}
            )
