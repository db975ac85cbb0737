"""What reading weights once per node gains: `make bench NAME=loading`.

Two or four ranks load a model of about 230 MB. Within each round, they load it in several ways, one
after the other. All ranks of the node share a fixed rate of the disk, as with mounted network
storage. No read is served from a cache, and the order of reads costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtests.gateway.report import table
from loadtests.harness.results import Spread, write
from loadtests.loading import buffers
from loadtests.loading.buffers import BufferRound
from loadtests.loading.ranks import Load, Loads, run
from loadtests.loading.storage import write_model

MIN_SPEEDUP: Final = 1.4  # S135
MIN_OVERLAP: Final = 1.25  # S87: a fifth less time


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways to load that are compared round by round. `title` names the storage."""

    title: str
    baseline: str
    ours: str
    slow_disk: bool
    slow_link: bool


SLOW: Final = Comparison("slow disk", "each rank reads", "file order", True, False)
OVERLAP: Final = Comparison("disk and device alike", "no overlap", "file order", True, True)
LOCAL: Final = Comparison("local disk, cached", "each rank maps", "file order", False, False)
COMPARISONS: Final = (SLOW, OVERLAP, LOCAL)


@dataclass(frozen=True, slots=True)
class Found:
    comparison: Comparison
    num_ranks: int
    model_bytes: int
    loads: Sequence[Load]

    def of(self, way: str) -> list[Load]:
        return [load for load in self.loads if load.way == way]

    @property
    def ratios(self) -> list[float]:
        """The baseline's time divided by ours, round by round."""
        pairs = zip(self.of(self.comparison.baseline), self.of(self.comparison.ours), strict=True)
        return [baseline.seconds / ours.seconds for baseline, ours in pairs]

    @property
    def bar(self) -> str:
        """The limit for the median ratio, and whether it is met. Empty if there is no limit."""
        ratio = statistics.median(self.ratios)
        if self.comparison is SLOW:
            return _met(ratio >= MIN_SPEEDUP, f">= {MIN_SPEEDUP} (S135)")
        if self.comparison is OVERLAP:
            return _met(ratio >= MIN_OVERLAP, f">= {MIN_OVERLAP} (S87)")
        return ""


def _met(is_met: bool, bar: str) -> str:
    return f"{bar}: {'met' if is_met else '**not met**'}"


HEAD: Final = (
    "storage", "ranks", "baseline", "its time, s", "file order, s", "ratio", "required",
    "bytes read, of the model", "buffers",
)  # fmt: skip


def rows(found: Sequence[Found]) -> list[list[str]]:
    made = []
    for each in found:
        way = each.comparison
        baseline, ours = each.of(way.baseline), each.of(way.ours)
        made.append(
            [
                way.title,
                str(each.num_ranks),
                way.baseline,
                Spread.of([load.seconds for load in baseline]).text(".2f"),
                Spread.of([load.seconds for load in ours]).text(".2f"),
                Spread.of(each.ratios).text(".2f"),
                each.bar,
                f"{_share(baseline, each)}, {_share(ours, each)}",
                str(max(load.num_allocations for load in ours)),
            ]
        )
    return made


def _share(loads: Sequence[Load], found: Found) -> str:
    """The bytes that the node's ranks read, divided by the model's bytes.

    The text is `mapped` if the ranks map the files instead of reading them.
    """
    share = max(load.disk_bytes for load in loads) / found.model_bytes
    return f"{share:.2f}" if share else "mapped"


def saved(rounds: Sequence[BufferRound], model_bytes: int) -> str:
    one, each = ([getattr(r, f"{n}_s") for r in rounds] for n in ("one", "each"))
    saving = Spread.of([(e - o) * (2 << 30) / model_bytes for o, e in zip(one, each, strict=True)])
    return (
        f"One buffer for all files: {Spread.of(one).text('.3f')} s to read them from the page "
        f"cache; a buffer for each file: {Spread.of(each).text('.3f')} s. That is "
        f"{saving.text('.2f')} s saved for each 2 GiB (S86; the paper's 0.6 s is for memory that "
        "is pinned for a GPU, too)."
    )


def compare(
    comparison: Comparison,
    num_ranks: int,
    folder: Path,
    index: Mapping[str, str],
    args: argparse.Namespace,
) -> Found:
    rate = 1e6 * args.mb_per_s
    loads = Loads(
        str(folder),
        index,
        num_ranks,
        args.rounds,
        rate * comparison.slow_disk,
        rate * comparison.slow_link,
        args.window_mb << 20,
        (comparison.baseline, comparison.ours),
    )
    with tempfile.TemporaryDirectory() as store:
        found = run(loads, Path(store, "store"))
    model_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Found(comparison, num_ranks, model_bytes, found)


def about(args: argparse.Namespace, model_bytes: int) -> str:
    return (
        f"A model of {model_bytes / 1e6:.0f} MB in four files, windows of {args.window_mb} MiB, "
        f"{args.rounds} rounds. Slow: {args.mb_per_s:g} MB/s for all ranks of the node together, "
        "never from a cache, whatever the order of the reads. With a device as slow, a rank's copy "
        "of a weight takes as long as its read. Cells: median (lowest..highest) of the rounds; a "
        "ratio is that of the two loads of one round. Two bytes-read figures: the baseline's, ours."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mb-per-s", type=float, default=80.0)
    parser.add_argument("--window-mb", type=int, default=16)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        index = write_model(folder, args.layers)
        found = list[Found]()
        for comparison in COMPARISONS:
            for num_ranks in args.ranks:
                found.append(compare(comparison, num_ranks, folder, index, args))
                print(" | ".join(rows(found[-1:])[0]), flush=True)
        rounds = buffers.measure(sorted(folder.glob("*.safetensors")), 4 * args.rounds)
    model_bytes = found[0].model_bytes
    text = f"{table(HEAD, rows(found))}\n\n{saved(rounds, model_bytes)}"
    print(text)
    if args.out:
        told = [asdict(each) for each in found]
        title, head = "Loading weights once per node", about(args, model_bytes)
        write(args.out, "loadtests.loading", title, head, text, found=told)


if __name__ == "__main__":
    main()
