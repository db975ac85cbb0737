"""What a transfer block by block costs, by the size of a block; writes
`loadtests/results/kv-blocks-<date>.{csv,md}` (S59, S60).

The same bytes are moved in blocks of several sizes. Each transport has one pair of processes. There
are four ways to move the bytes:

- one block at a time, each after the ack of the block before;
- blocks one after the other, with up to 32 in flight;
- two ways that gather the blocks into a contiguous buffer and send that, as the product does: the
  whole model at once, or layer by layer.

The KV of SmolLM2 is moved as well, in vLLM's blocks of 16 tokens with K and V of a layer together.
The wire's rate is measured with a single payload on one connection. Utilisation is the share of
this rate that a transfer reaches.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from loadtests.harness.generator import ROOT
from loadtests.kv_bench.block_rounds import measure
from loadtests.kv_bench.pair import TRANSPORTS
from loadtests.kv_bench.report.block_page import BlockFigures, markdown
from loadtests.kv_bench.report.figures import write_csv


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.kv_bench.blocks", description=__doc__
    )
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--within", type=float, default=150.0, metavar="SECONDS", help="begin no round later"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "loadtests" / "results")
    args = parser.parse_args()
    rows = measure(
        args.transports.split(","),
        args.rounds,
        args.within,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    command = shlex.join(["python", "-m", "loadtests.kv_bench.blocks", *sys.argv[1:]])
    text = markdown(BlockFigures(rows), command)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"kv-blocks-{datetime.now(UTC):%Y-%m-%d}"
    write_csv(rows, stem.with_suffix(".csv"))
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
