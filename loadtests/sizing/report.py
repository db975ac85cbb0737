"""Writes the record of a check: tables of errors, and conclusions in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadtests.harness.results import quantile
from loadtests.sizing.check import Checked, Side
from pdmesh.core.sizing.deployment import Seen

_HEAD = (
    "| scene | requests/s | side | GPUs | load carried: plan | mesh | error | one less also |\n"
    "|---|---|---|---|---|---|---|---|"
)
_TIMES_HEAD = (
    "| scene | requests/s | side | TTFT P50 | TTFT P99 | TPOT P50 | TPOT P99 | kept |\n"
    "|---|---|---|---|---|---|---|---|"
)
_QUANTITIES: tuple[tuple[str, Callable[[Seen], float], Callable[[Side], float]], ...] = (
    ("TTFT P50", lambda s: s.ttft_p50_s, lambda s: s.played.ttft_p50_s),
    ("TTFT P99", lambda s: s.ttft_s, lambda s: s.played.ttft_s),
    ("TPOT P50", lambda s: s.tpot_p50_s, lambda s: s.played.tpot_p50_s),
    ("TPOT P99", lambda s: s.tpot_s, lambda s: s.played.tpot_s),
)


def markdown(found: Sequence[Checked]) -> str:
    sides = [(c, name, side) for c in found for name, side in _sides(c)]
    parts = ["## Errors over all scenes", "", _summary(sides), "", "## Verdicts", ""]
    parts += ["| scene | requests/s | P/D GPUs | fusion GPUs | the plan says | right |"]
    parts += ["|---|---|---|---|---|---|", *(_verdict(c) for c in found), ""]
    parts += ["## Load", "", _HEAD, *(_load(c, name, side) for c, name, side in sides), ""]
    parts += ["## Times at the planned load (plan / mesh)", "", _TIMES_HEAD]
    parts += [_times(c, name, side) for c, name, side in sides]
    return "\n".join(parts)


def _sides(checked: Checked) -> Iterator[tuple[str, Side]]:
    for name, side in (("P/D", checked.pair), ("fusion", checked.fusion)):
        if side is not None:
            yield name, side


def _summary(sides: Sequence[tuple[Checked, str, Side]]) -> str:
    rows = ["| what | P/D: median error | largest | fusion: median error | largest |"]
    rows += ["|---|---|---|---|---|"]
    quantities: list[tuple[str, Callable[[Side], float]]] = [
        ("highest load", lambda side: side.load_error)
    ]
    quantities += [(n, _relative(seen, played)) for n, seen, played in _QUANTITIES]
    for what, error in quantities:
        cells = [what]
        for name in ("P/D", "fusion"):
            errors = sorted((error(s) for _, each, s in sides if each == name), key=abs)
            cells += [f"{quantile(errors, 0.5):+.0%}", f"{errors[-1]:+.0%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _relative(
    seen: Callable[[Seen], float], played: Callable[[Side], float]
) -> Callable[[Side], float]:
    return lambda side: seen(side.seen) / played(side) - 1


def _verdict(checked: Checked) -> str:
    right = "yes" if checked.is_right else "no"
    pair, fusion = checked.ranges
    return (
        f"| {checked.scene} | {checked.rate_per_s:g} | {pair} | {fusion} | {checked.answer} |"
        f" {right} |"
    )


def _load(checked: Checked, name: str, side: Side) -> str:
    spare = ", ".join(role for role, can in side.can_spare.items() if can) or "none"
    return (
        f"| {checked.scene} | {checked.rate_per_s:g} | {name}, {side.deployment} |"
        f" {side.num_gpus} | {side.planned_per_s:.3g} | {side.played_per_s:.3g} |"
        f" {side.load_error:+.0%} | {spare} |"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 1 else f"{1000 * seconds:.3g}"


def _times(checked: Checked, name: str, side: Side) -> str:
    cells = [f"{_ms(seen(side.seen))} / {_ms(played(side))} ms" for _, seen, played in _QUANTITIES]
    told = " | ".join(cells)
    kept = f"{side.played.kept:.2%}"
    return f"| {checked.scene} | {checked.rate_per_s:g} | {name} | {told} | {kept} |"
