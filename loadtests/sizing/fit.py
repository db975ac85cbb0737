"""Fits the shares of the peaks that an engine reaches, and says how far the laws then are off.

    python -m loadtests.sizing.fit VENV/bin/python        # of a venv with aiconfigurator
    python -m loadtests.sizing.fit --times times.jsonl    # its output of an earlier run

A law computes the time of a step from the peak rates of an accelerator. Engines reach only a share
of each peak. The program fits these shares to the times of aiconfigurator, which come from kernels
that NVIDIA measured with vLLM. It prints the table of `core/sizing/efficiency.py`, and the errors
by accelerator and kind of model. Mixed steps are not used for the fit. Their error shows whether
`Law.mixed_s` is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from loadtests.harness.results import quantile
from pdmesh.core.sizing.accelerators import ACCELERATORS
from pdmesh.core.sizing.efficiency import Efficiency
from pdmesh.core.sizing.model_shape import ModelShape, model_shape
from pdmesh.core.sizing.roofline import efficiency_key, law_of, prefill_terms, step_terms

SCRIPT: Final = Path(__file__).with_name("aiconfigurator_times.py")
# the usable share of memory; larger engines cannot exist, so their steps are left out
_FITS: Final = 0.85
_NO_LINK: Final = frozenset({"l40s"})  # the tables only extrapolate its all-reduces, which use PCIe
_ROUNDS: Final = 20_000
_UNUSED: Final = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: of prompts, of decodes, or of a chunk of prompts beside decodes."""

    gpu: str
    model: str
    tp: int
    kind: str
    batch: int
    length: int
    chunk: int
    seconds: float


def read(lines: Iterable[str]) -> tuple[dict[str, ModelShape], list[Measured]]:
    shapes, found = dict[str, ModelShape](), list[Measured]()
    for line in lines:
        row: dict[str, Any] = json.loads(line)
        if "config" in row:
            shape = model_shape(row["config"])
            # aiconfigurator stores the KV of fp8 models in fp8, like vLLM's recipes.
            shapes[row["model"]] = shape.with_fp8_kv() if shape.compute == "fp8" else shape
            continue
        found.append(
            Measured(
                row["gpu"], row["model"], row["tp"], row["kind"], row["batch"], row["length"],
                row.get("chunk", 0), row["ms"] / 1e3,
            )
        )  # fmt: skip
    return shapes, [each for each in found if _exists(shapes[each.model], each)]


def _exists(shape: ModelShape, each: Measured) -> bool:
    if each.gpu in _NO_LINK and each.tp > 1:
        return False
    device = ACCELERATORS[each.gpu]
    has_unit = device.flops(shape.compute) > 0
    return has_unit and shape.weight_bytes / each.tp < _FITS * device.memory_bytes


def _prefill_row(shape: ModelShape, each: Measured) -> list[float]:
    terms = prefill_terms(shape, ACCELERATORS[each.gpu], each.tp)
    tokens = each.batch * each.length
    return [
        terms.layers, terms.token_s * tokens, terms.pair_s * tokens * each.length / 2,
        terms.link_token_s * tokens, terms.reductions,
    ]  # fmt: skip


def _step_row(shape: ModelShape, each: Measured) -> list[float]:
    terms = step_terms(shape, ACCELERATORS[each.gpu], each.tp)
    touched = 1 - (1 - shape.expert_share) ** each.batch
    return [
        terms.layers, terms.weights_s, terms.experts_s * touched, terms.sequence_s * each.batch,
        terms.context_token_s * each.batch * each.length, terms.reductions,
    ]  # fmt: skip


def solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Minimise the squared relative errors by coordinate descent. Returns the coefficients.

    The first and last coefficient are seconds and at least 0. The others are reciprocals of shares
    of a peak and at least 1.
    """
    size = len(rows[0])
    least = [0.0, *[1.0] * (size - 2), 0.0]
    scaled = [[value / t for value in row] for row, t in zip(rows, seconds, strict=True)]
    gram = [[sum(r[i] * r[j] for r in scaled) for j in range(size)] for i in range(size)]
    right = [sum(r[i] for r in scaled) for i in range(size)]
    x = list(least)
    for _ in range(_ROUNDS):
        moved = 0.0
        for i in range(size):
            if gram[i][i] == 0:
                continue
            rest = right[i] - sum(gram[i][j] * x[j] for j in range(size) if j != i)
            new = max(least[i], rest / gram[i][i])
            moved = max(moved, abs(new - x[i]) / max(abs(new), 1e-12))
            x[i] = new
        if moved < 1e-9:
            break
    return [v if gram[i][i] else least[i] for i, v in enumerate(x)]


def fitted(shapes: dict[str, ModelShape], steps: Sequence[Measured]) -> Efficiency:
    def of(kind: str, row: Callable[[ModelShape, Measured], list[float]]) -> list[float]:
        own = [each for each in steps if each.kind == kind]
        return solve([row(shapes[e.model], e) for e in own], [e.seconds for e in own])

    prompt, step = of("prefill", _prefill_row), of("decode", _step_row)
    ends = [prompt[0], *(1 / each for each in prompt[1:4]), prompt[4]]
    ends += [step[0], *(1 / each for each in step[1:5]), step[5], 0.0, 0.0]
    names = [each.name for each in fields(Efficiency)]
    share = Efficiency(**dict(zip(names, ends, strict=True)))
    off = errors(shapes, steps, share)
    prefill_off, step_off = (
        quantile(sorted(map(abs, off[kind])), 0.9) for kind in ("prefill", "decode")
    )
    return replace(share, prefill_off=prefill_off, step_off=step_off)


def predicted_s(shape: ModelShape, each: Measured, share: Efficiency) -> float:
    law = law_of(shape, ACCELERATORS[each.gpu], each.tp, share)
    if each.kind == "decode":
        return law.step_s(each.batch, each.batch * each.length)
    if each.kind == "prefill":
        return law.prefill_s(each.batch * each.length, 0, each.batch)
    batch = max(1, each.chunk // each.length)
    alone = law.prefill_s(each.chunk, 0, batch)
    return law.mixed_s(alone, each.batch, each.batch * each.length)


def kinds(shapes: dict[str, ModelShape], steps: Sequence[Measured]) -> list[tuple[str, str, str]]:
    return sorted({key_of(shapes[each.model], each) for each in steps})


def key_of(shape: ModelShape, each: Measured) -> tuple[str, str, str]:
    return efficiency_key(shape, ACCELERATORS[each.gpu])


def errors(
    shapes: dict[str, ModelShape], steps: Sequence[Measured], share: Efficiency
) -> dict[str, list[float]]:
    """The relative errors, by kind of step."""
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "mixed": []}
    for each in steps:
        found[each.kind].append(predicted_s(shapes[each.model], each, share) / each.seconds - 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("python", nargs="?", help="an interpreter that has aiconfigurator 0.12")
    which.add_argument("--times", type=Path, help="what it printed earlier")
    options = parser.parse_args()
    if options.times:
        text = options.times.read_text()
    else:
        command = [options.python, str(SCRIPT)]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    shapes, steps = read(text.splitlines())
    told = list[str]()
    for key in kinds(shapes, steps):
        own = [each for each in steps if key_of(shapes[each.model], each) == key]
        share = fitted(shapes, own)
        print(f"    {_quoted(key)}: Efficiency(")
        values = [f"{v:.2g}" if v < 0.001 else f"{v:.3g}" for v in astuple(share)]
        print(f"        {', '.join(values[:5])},\n        {', '.join(values[5:])},\n    ),")
        told += [_line(key, kind, off) for kind, off in errors(shapes, own, share).items() if off]
    print("\n| accelerator | numbers | model | step | steps | median error | 90 % within | bias |")
    print("|---|---|---|---|---|---|---|---|")
    print(*told, sep="\n")


def _quoted(key: tuple[str, str, str]) -> str:
    return "(" + ", ".join(f'"{part}"' for part in key) + ")"


def _line(key: tuple[str, str, str], kind: str, off: Sequence[float]) -> str:
    size = sorted(abs(each) for each in off)
    middle, most = quantile(size, 0.5), quantile(size, 0.9)
    bias = statistics.median(off)
    cells = [*key, kind, str(len(off)), f"{middle:.0%}", f"{most:.0%}", f"{bias:+.0%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
