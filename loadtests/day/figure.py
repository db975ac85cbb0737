"""Describes one day of a mesh as a document, and draws it as a page (S64).

The page is like P/D-Serve's figures 12c and 13b: traffic, instances, the share of T_p (the time
until token 1) in E2E, E2E, and actions. Each run of a day, simulated or on a mesh, writes this
document. The page and its table are drawn from the document alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

_HOUR_S: Final = 3600.0
_COLOURS: Final = {
    "decided": "tab:purple",
    "move": "tab:blue",
    "scale": "tab:green",
    "upgrade": "tab:orange",
    "fault": "tab:red",
    "substituted": "tab:olive",
    "change": "black",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One line of the event log.

    `at_s` is in seconds of the day. `kind` is a key of the figure's colours.
    """

    at_s: float
    kind: str
    scenario: str
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A scenario in one window.

    For each group, `groups` has the number of prefills, the number of decodes, and the pool that
    borrowed the group. A value of None means that no request ended in the window.
    """

    at_s: float
    scenario: str
    rate_per_s: float
    answered_per_s: float
    e2e_s: float | None
    t_p_share: float | None
    success_share: float | None
    groups: dict[str, tuple[int, int, str]]


@dataclass(slots=True)
class Day:
    """The document of one day.

    `source` is "simulated", or the mesh on which the day ran. `speed` is the number of seconds of
    the day that pass in one second of the run.
    """

    source: str
    command: str
    speed: float
    num_requests: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_migrated: int = 0
    missed: list[str] = field(default_factory=list)  # expected events that did not happen
    points: list[Point] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def write(self, out: Path) -> None:
        out.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(self))
        draw(self, out.with_suffix(".png"))


def markdown(day: Day) -> str:
    served = day.num_requests - day.num_failed
    lines = [
        f"# A day, {day.source}",
        "",
        f"`{day.command}`",
        "",
        (
            f"{day.num_requests:,} requests in 24 h at {day.speed:g} times the pace: {served:,} "
            f"answered, {day.num_failed} failed,"
            f" {day.num_late} later than their SLO; {day.num_migrated} went on elsewhere when an "
            "instance died."
        ),
        "",
        *(f"**Did not happen: {each}.**" for each in day.missed),
        *([""] if day.missed else []),
        "| time | what | scenario | |",
        "|---|---|---|---|",
    ]
    lines += [f"| {clock(a.at_s)} | {a.kind} | {a.scenario} | {a.text} |" for a in day.actions]
    return "\n".join(lines) + "\n"


def clock(at_s: float) -> str:
    minutes = int(at_s // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def draw(day: Day, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    scenarios = list(dict.fromkeys(p.scenario for p in day.points))
    figure, rows = plt.subplots(
        4, len(scenarios), figsize=(7 * len(scenarios), 11), sharex=True, squeeze=False
    )
    for column, scenario in enumerate(scenarios):
        points = [p for p in day.points if p.scenario == scenario]
        hours = [p.at_s / _HOUR_S for p in points]
        own = [a for a in day.actions if a.scenario in (scenario, "")]
        traffic, instances, latency, actions = (row[column] for row in rows)
        traffic.plot(hours, [p.rate_per_s for p in points], label="asked")
        traffic.plot(hours, [p.answered_per_s for p in points], label="answered", linewidth=0.8)
        traffic.set_title(f"{scenario}: requests/s ({day.source})", fontsize=9)
        traffic.legend(fontsize=7)
        names = sorted({group for p in points for group in p.groups})
        heights, labels = [], []
        for name in names:
            for at, role in ((0, "P"), (1, "D")):
                heights.append([_num(p, name, at) for p in points])
                labels.append(f"{name} {role}")
        heights.append([_lent(p) for p in points])
        labels.append("training")
        palette = plt.get_cmap("tab20")
        colours = [palette(i % 20) for i in range(len(heights) - 1)] + ["lightgray"]
        instances.stackplot(hours, heights, labels=labels, colors=colours, step="post")
        instances.set_title("instances by group and role", fontsize=9)
        instances.legend(fontsize=6, ncol=3, loc="lower left")
        latency.plot(hours, [p.e2e_s for p in points], color="tab:red", label="E2E, s")
        latency.set_title("mean E2E and the share of T_p in it", fontsize=9)
        share = latency.twinx()
        share.plot(hours, [p.t_p_share for p in points], color="tab:blue", label="T_p / E2E")
        latency.legend(fontsize=7, loc="upper left")
        share.legend(fontsize=7, loc="upper right")
        kinds = [kind for kind in _COLOURS if any(a.kind == kind for a in own)]
        for action in own:
            height = kinds.index(action.kind)
            actions.plot(action.at_s / _HOUR_S, height, "|", color=_COLOURS[action.kind], ms=14)
        actions.set_yticks(range(len(kinds)), kinds, fontsize=7)
        actions.set_xlabel("hour")
        actions.set_xlim(0, 24)
        for each in _marks(own):
            for axis in (traffic, instances, latency):
                axis.axvline(each.at_s / _HOUR_S, color=_COLOURS[each.kind], linewidth=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _marks(actions: Iterable[Action]) -> list[Action]:
    return [a for a in actions if a.kind in ("fault", "move", "change")]


def _num(point: Point, group: str, at: int) -> int:
    found = point.groups.get(group)
    if found is None or found[2]:
        return 0
    return found[0] if at == 0 else found[1]


def _lent(point: Point) -> int:
    return sum(p + d for p, d, pool in point.groups.values() if pool)
