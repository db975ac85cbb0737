"""Measure and write `loadtests/results/kv-<date>.{csv,md,png}`."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from loadtests.harness.generator import ROOT
from loadtests.kv_bench.movers import peers
from loadtests.kv_bench.pair import TRANSPORTS
from loadtests.kv_bench.report.figures import Figures, write_csv
from loadtests.kv_bench.report.page import markdown
from loadtests.kv_bench.report.plot import draw
from loadtests.kv_bench.rounds import Plan, measure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.kv_bench", description=__doc__)
    parser.add_argument("--sizes", default="1,4,16,64,256", help="MiB, comma-separated")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--within", type=float, default=600.0, metavar="SECONDS", help="begin no round later"
    )
    parser.add_argument("--no-perftest", action="store_true", help="leave out ucx_perftest")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="LIBRARY=WHERE",
        help=f"measure a library ({', '.join(peers.TRANSPORTS_OF)}) too: an interpreter that has "
        "it, or a folder it was installed to",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "loadtests" / "results")
    args = parser.parse_args()
    named = dict(pair.split("=", 1) for pair in args.peer_python)
    plan = Plan(
        transports=args.transports.split(","),
        sizes=[int(size) << 20 for size in args.sizes.split(",")],
        rounds=args.rounds,
        within_s=args.within,
        peers={name: Path(program) for name, program in named.items()},
        has_perftest=not args.no_perftest,
    )
    rows = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    figures = Figures(rows)
    command = shlex.join(["python", "-m", "loadtests.kv_bench", *sys.argv[1:]])
    text = markdown(figures, command)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"kv-{datetime.now(UTC):%Y-%m-%d}"
    write_csv(rows, stem.with_suffix(".csv"))
    stem.with_suffix(".md").write_text(text)
    draw(figures, stem.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
