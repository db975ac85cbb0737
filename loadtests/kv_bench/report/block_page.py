"""Writes the results of blocks.py as Markdown.

The page has the bars and, for each transport, the cost of a block and the utilisation of the wire.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from loadtests.kv_bench import cases
from loadtests.kv_bench.block_rounds import (
    BLOCK_TOKENS,
    FREE,
    MODES,
    NUM_LAYERS,
    SMOLLM2,
    SWEEP,
    SWEEP_BYTES,
    TOKENS,
    Prompt,
    Row,
)
from loadtests.kv_bench.cases import Paging
from loadtests.kv_bench.report.figures import BAR_TOTAL, Spread
from loadtests.kv_bench.report.page import (
    head,
    number,
    row,
    show,
    table_head,
)

_BLOCK_COLUMNS = ("block_ms", "block_p99_ms", "block_deviation_ms")


class BlockFigures:
    """The figures of all rounds. There is at least one round, with every transport, prompt and
    mode.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.transports = list(dict.fromkeys(r.transport for r in rows))
        self.num_rounds = len({r.round for r in rows})
        self._cells: dict[tuple[str, Prompt, str], list[Row]] = {}
        for r in sorted(rows, key=lambda r: r.round):
            prompt = Prompt(r.num_bytes, Paging(r.num_layers, r.block_bytes))
            self._cells.setdefault((r.transport, prompt, r.mode), []).append(r)

    def by_round(
        self, transport: str, prompt: Prompt, mode: str, column: str = "total_ms"
    ) -> list[float]:
        return [float(getattr(r, column)) for r in self._cells[transport, prompt, mode]]

    def total_ms(self, transport: str, prompt: Prompt, mode: str) -> Spread:
        return _spread(self.by_round(transport, prompt, mode))

    def ratio(self, transport: str, prompt: Prompt, mode: str, of_mode: str) -> Spread:
        """The ratio of two modes, each time within a round."""
        ours = self.by_round(transport, prompt, mode)
        return _spread(
            [a / b for a, b in zip(ours, self.by_round(transport, prompt, of_mode), strict=True)]
        )

    def utilisation(self, transport: str, prompt: Prompt, mode: str) -> Spread:
        return self.ratio(transport, prompt, cases.WIRE, mode)

    def block_us(self, transport: str, prompt: Prompt) -> Spread:
        """The mean time of a block in a transfer block by block, in microseconds."""
        acked = self.by_round(transport, prompt, cases.BLOCKS_ACKED)
        return _spread([ms * 1e3 / prompt.num_blocks for ms in acked])

    def control_us(self, transport: str, prompt: Prompt) -> Spread:
        """The mean time of a block minus the time of its bytes at the wire's rate, in
        microseconds.
        """
        acked = self.by_round(transport, prompt, cases.BLOCKS_ACKED)
        wire = self.by_round(transport, prompt, cases.WIRE)
        return _spread(
            [(a - w) * 1e3 / prompt.num_blocks for a, w in zip(acked, wire, strict=True)]
        )

    def deviation(self, transport: str, prompt: Prompt, mode: str) -> float:
        """The standard deviation of transfer times over the rounds, as a share of their mean."""
        values = self.by_round(transport, prompt, mode)
        return statistics.pstdev(values) / statistics.fmean(values)

    def is_rising(self, transport: str) -> bool:
        """Whether the utilisation of transfers block by block is higher with each larger block
        size.
        """
        medians = [self.utilisation(transport, p, cases.BLOCKS_ACKED).median for p in SWEEP]
        return all(small < large for small, large in pairwise(medians))


def _spread(values: Sequence[float]) -> Spread:
    found = Spread.of(values)
    assert found is not None, "nothing was measured"
    return found


def markdown(figures: BlockFigures, command: str) -> str:
    about = (
        f"{SWEEP_BYTES >> 20} MiB of {NUM_LAYERS} layers in blocks of each size, in random order, "
        "from cache to cache. Medians over rounds, lowest and "
        "highest in brackets; ratios and differences are of measurements of the same round. "
        "Utilisation is the share of the rate of the payload alone. "
        "Block-free includes xxh3 checksums on both sides, the others none."
    )
    lines = [*head("KV transfer by size of block", command, figures.num_rounds), about, ""]
    lines += _bars(figures)
    for transport in figures.transports:
        lines += _sweep(figures, transport)
    lines += _smollm2(figures)
    return "\n".join(lines) + "\n"


def _bars(figures: BlockFigures) -> Iterator[str]:
    yield from table_head(["bar", "limit", *figures.transports])
    cells = []
    for transport in figures.transports:
        shares = [_share(figures, transport, cases.BLOCKS_ACKED, prompt) for prompt in SWEEP]
        cells.append(", ".join(shares) + _mark(figures.is_rising(transport)))
    yield row(["utilisation, block by block", "rises with the size of a block", *cells])
    for mode in FREE:
        cells = []
        for transport in figures.transports:
            ratio = figures.ratio(transport, SMOLLM2, mode, cases.BLOCKS_ACKED)
            cells.append(show(ratio, 2) + _mark(ratio.median <= BAR_TOTAL))
        name = f"SmolLM2 in blocks of {BLOCK_TOKENS} tokens: {cases.LABELS[mode]} / block by block"
        yield row([name, f"<= {BAR_TOTAL}", *cells])
    yield ""


def _mark(is_met: bool) -> str:
    return "" if is_met else " **unmet**"


def _sweep(figures: BlockFigures, transport: str) -> Iterator[str]:
    yield f"## {transport}"
    yield ""
    sizes = [f"{p.paging.block_bytes >> 10} KiB x {p.num_blocks}" for p in SWEEP]
    yield from table_head(["", *sizes])

    def line(label: str, cell: Callable[[Prompt], str]) -> str:
        return row([label, *map(cell, SWEEP)])

    for mode in MODES:
        share = partial(_share, figures, transport, mode)
        yield line(f"utilisation: {cases.LABELS[mode]}", share)
    yield line("us a block, acknowledged", lambda p: show(figures.block_us(transport, p)))
    yield line(
        "of these control: beside its bytes at the wire's rate",
        lambda p: show(figures.control_us(transport, p)),
    )
    yield line(
        "one block within a transfer, us: median / p99 / standard deviation",
        partial(_one_block, figures, transport),
    )
    for mode in (*MODES, cases.WIRE):
        yield line(f"ms: {cases.LABELS[mode]}", partial(_total, figures, transport, mode))
    for mode in FREE:
        yield line(
            f"{cases.LABELS[mode]} / block by block", partial(_of_acked, figures, transport, mode)
        )
    for mode in MODES:
        yield line(
            f"standard deviation of a transfer over rounds: {cases.LABELS[mode]}",
            partial(_deviation, figures, transport, mode),
        )
    yield ""


def _share(figures: BlockFigures, transport: str, mode: str, prompt: Prompt) -> str:
    return f"{100 * figures.utilisation(transport, prompt, mode).median:.1f} %"


def _total(figures: BlockFigures, transport: str, mode: str, prompt: Prompt) -> str:
    return show(figures.total_ms(transport, prompt, mode))


def _of_acked(figures: BlockFigures, transport: str, mode: str, prompt: Prompt) -> str:
    return show(figures.ratio(transport, prompt, mode, cases.BLOCKS_ACKED), 2)


def _deviation(figures: BlockFigures, transport: str, mode: str, prompt: Prompt) -> str:
    return f"{100 * figures.deviation(transport, prompt, mode):.0f} %"


def _one_block(figures: BlockFigures, transport: str, prompt: Prompt) -> str:
    """The times of a transfer's blocks, as medians over the rounds."""
    columns = (figures.by_round(transport, prompt, cases.BLOCKS_ACKED, c) for c in _BLOCK_COLUMNS)
    return " / ".join(number(statistics.median(values) * 1e3) for values in columns)


def _smollm2(figures: BlockFigures) -> Iterator[str]:
    paging = SMOLLM2.paging
    yield f"## SmolLM2, {TOKENS} tokens in blocks of {BLOCK_TOKENS}"
    yield ""
    yield (
        f"{SMOLLM2.num_bytes / 2**20:.1f} MiB: {paging.num_layers} layers, K and V of a layer's "
        f"block together {paging.block_bytes >> 10} KiB, "
        f"{SMOLLM2.num_blocks} of them, as vLLM's cache has them on a CPU."
    )
    yield ""
    yield from table_head(["", *figures.transports])
    for mode in (*MODES, cases.WIRE):
        cells = [_total(figures, t, mode, SMOLLM2) for t in figures.transports]
        yield row([f"ms: {cases.LABELS[mode]}", *cells])
    for mode in MODES:
        cells = [_share(figures, t, mode, SMOLLM2) for t in figures.transports]
        yield row([f"utilisation: {cases.LABELS[mode]}", *cells])
    yield ""
