"""Examines a running mesh: its leader, its processes, their releases, health and clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pdmesh.cli.doctor.diagnosis import Diagnosis, ok, problem, warning

_MAX_SKEW_S: Final = 1.0
_SINGLE: Final = {
    "gateway": "no gateway is registered, so clients reach nothing",
    "master-scheduler": "no master-scheduler is registered, so requests get no plans",
    "kv-cache-index": "no KV-cache index is registered, so requests find no cached KV elsewhere",
    "health-monitor": "no health-monitor is registered, so faults are found late",
}
_READ_LOG: Final = "read its log: pdmesh logs {name}"


def of_services(services: Iterable[str]) -> Iterator[Diagnosis]:
    """`services` has the service name of each registered process."""
    found = set(services)
    missing = [text for service, text in _SINGLE.items() if service not in found]
    yield from (problem("services", text, "start one") for text in missing)
    if not missing:
        yield ok("services", "every kind of service is registered")


def of_leader(epoch: int | None) -> Diagnosis:
    if epoch is None:
        return problem("leader", "no master answers as the leader", _READ_LOG.format(name=""))
    return ok("leader", f"epoch {epoch}")


def of_versions(versions: Mapping[str, str]) -> Diagnosis:
    """`versions` has the release of each process, by the process's name."""
    by_release: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(versions.items()):
        by_release[version].append(name)
    if len(by_release) < 2:
        return ok("releases", f"all processes run {next(iter(by_release), 'none')}")
    few = min(by_release.values(), key=len)
    text = "; ".join(f"{release}: {len(names)}" for release, names in sorted(by_release.items()))
    return warning("releases", f"processes run several: {text}", f"update {', '.join(few)}")


def of_health(healths: Mapping[str, str], down: Iterable[str]) -> Iterator[Diagnosis]:
    """`healths` has each instance's health, by name. `down` has the processes that do not run."""
    bad = {name: text for name, text in healths.items() if text != "healthy"}
    for name, text in sorted(bad.items()):
        yield problem("health", f"{name} is {text}", _READ_LOG.format(name=name))
    gone = sorted(down)
    for name in gone:
        yield problem("processes", f"{name} does not run", _READ_LOG.format(name=name.split()[0]))
    if not bad and not gone:
        yield ok("health", f"all {len(healths)} instances are healthy")


def of_clocks(ahead_s: Mapping[str, float]) -> Iterator[Diagnosis]:
    """`ahead_s` has the seconds by which a process's clock is ahead of ours, by process name."""
    wrong = {name: s for name, s in ahead_s.items() if abs(s) > _MAX_SKEW_S}
    for name, seconds in sorted(wrong.items()):
        where = "ahead of" if seconds > 0 else "behind"
        text = f"the clock of {name} is {abs(seconds):.1f} s {where} this machine's"
        yield warning("clocks", text, "run an NTP client on both machines")
    if not wrong and ahead_s:
        yield ok("clocks", f"{len(ahead_s)} processes agree within {_MAX_SKEW_S:g} s")
