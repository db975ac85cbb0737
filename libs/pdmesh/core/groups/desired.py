"""The desired state of the mesh as one value, its problems and its diffs (P/D-Serve 2.2, 3.3).

It has services, scenarios, groups, schedules and regions. An operator writes it as a file,
and controllers compare it with what instances report. It says how many instances of each role a
group has, never which ones. The reader of the file (`pdmesh.desired_file`) checks names; `problems`
finds errors that show only when all parts are seen together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Final

from pdmesh.core.groups.kv_options import KV_OPTIONS, OptionText, kv_split
from pdmesh.core.model import Role
from pdmesh.core.moves.move import OFF_POOL, TRAINING_POOL
from pdmesh.core.moves.move_refusal import MIN_PER_SCENARIO
from pdmesh.core.request.slo import ScenarioSlo

DEFAULT_NAME: Final = "default"
SERVING_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.FUSION, Role.POOLING, Role.ENCODER)
CANARY_PREFIX: Final = "canary-"  # of the groups that an upgrade adds to a scenario
_REVISION_HEX: Final = 12
# Fields that a file writes in another way.
_SAID_OTHERWISE: Final = frozenset({"has_auto_ratio", "action", "num_groups"})

Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    """A model as clients know it, and what its instances load.

    Where a value is empty, the instance's own setting holds.
    """

    model: str = ""
    model_dir: str = ""
    manifests: Mapping[Role, str] = field(default_factory=dict)  # they differ by role (S17)
    options: Options = field(default_factory=dict)  # settings of its instances, by name
    role_options: Mapping[Role, Options] = field(default_factory=dict)
    release: str = ""  # change it when the same names refer to new files
    # Ranks of a data-parallel domain, which is one member of a group; 1 if a role is not named.
    dp_size: Mapping[Role, int] = field(default_factory=dict)

    def ranks_of(self, role: Role) -> int:
        return self.dp_size.get(role, 1)

    def options_for(self, role: Role) -> dict[str, str]:
        return {**self.options, **self.role_options.get(role, {})}


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """How long a group with a new revision is on trial, and what rolls the upgrade back (S24).

    The next group gets the revision after `soak_s`. A group must be complete within
    `group_timeout_s`. `max_failed_share`: the share of its requests that may fail; `max_slowdown`:
    how many times as long T_p or a token may take.
    """

    soak_s: float = 60.0
    group_timeout_s: float = 900.0
    max_failed_share: float = 0.01
    max_slowdown: float = 2.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests of one kind.

    `allow_single`: one prefill, one decode or one region is enough, and its loss is an outage (S31,
    S58). `has_auto_ratio`: its P:D ratio follows what its requests need (S29). If `slo` is None,
    the gateways' own settings hold.
    """

    service: str = DEFAULT_NAME
    allow_single: bool = False
    has_auto_ratio: bool = False
    upgrade: UpgradeLimits = field(default_factory=UpgradeLimits)
    slo: ScenarioSlo | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Instances that hand KV to each other and to no instance outside (S13).

    A group with pooling instances has no other instances, since its model makes no answers. The
    encoders of a group encode images for the instances that compute its prompts. Those instances
    can encode images themselves, so no group needs encoders.
    """

    scenario: str = DEFAULT_NAME
    prefill: int = 0
    decode: int = 0
    fusion: int = 0
    pooling: int = 0
    encoder: int = 0
    region: str = ""  # empty: any region that has room
    failover: tuple[str, ...] = ()  # regions for it while its own has no room
    spans_regions: bool = False  # its KV may go from one region to another
    racks: tuple[str, ...] = ()  # where its instances may be; empty: anywhere

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that it may be in, the preferred one first; empty: any."""
        return (self.region, *self.failover) if self.region else ()

    def num(self, role: Role) -> int:
        return {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.FUSION: self.fusion,
            Role.POOLING: self.pooling,
            Role.ENCODER: self.encoder,
        }[role]

    @property
    def size(self) -> int:
        return self.prefill + self.decode + self.fusion + self.pooling + self.encoder


@dataclass(frozen=True, slots=True)
class ScheduleLine:
    """What to do to groups of a scenario at each time of `at` (S11, S21).

    `at` is a cron expression: minute hour day month weekday.
    """

    at: str
    scenario: str
    action: str  # add, remove, lend, reclaim
    num_groups: int = 1
    pool: str = TRAINING_POOL  # OFF_POOL for add and remove


@dataclass(frozen=True, slots=True)
class Desired:
    services: Mapping[str, Service] = field(default_factory=dict)
    scenarios: Mapping[str, Scenario] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    schedules: tuple[ScheduleLine, ...] = ()
    regions: tuple[str, ...] = ()  # those that groups may name

    def num_instances(self, group: Group) -> int:
        """Of all members of the group: a data-parallel domain has several."""
        service = self.service_of(group)
        return sum(group.num(role) * service.ranks_of(role) for role in SERVING_ROLES)

    def service_of(self, group: Group) -> Service:
        return self.services.get(self.scenario_of(group).service, Service())

    def scenario_of(self, group: Group) -> Scenario:
        return self.scenarios.get(group.scenario, Scenario())

    def allows_single(self, scenario: str) -> bool:
        return self.scenarios.get(scenario, Scenario()).allow_single

    def groups_by_scenario(self) -> dict[str, dict[str, Group]]:
        found: dict[str, dict[str, Group]] = {}
        for group_id, group in self.groups.items():
            found.setdefault(group.scenario, {})[group_id] = group
        return found


@dataclass(frozen=True, slots=True)
class Problem:
    path: str  # groups.chat.scenario
    message: str


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs. `before` None: it was not there; `after` None: it is gone."""

    path: str
    before: str | None
    after: str | None


def problems(desired: Desired) -> Iterator[Problem]:
    """Unknown names, single points of failure, and parts that cannot serve or be lent."""
    for name, scenario in desired.scenarios.items():
        if scenario.service != DEFAULT_NAME and scenario.service not in desired.services:
            yield Problem(f"scenarios.{name}.service", f"there is no service {scenario.service}")
    for name, service in desired.services.items():
        yield from _split_kv(f"services.{name}", service)
    regions = frozenset(desired.regions)
    for name, group in desired.groups.items():
        yield from _problems_of_group(f"groups.{name}", group, desired, regions)
    by_scenario = desired.groups_by_scenario()
    for scenario_name, own in sorted(by_scenario.items()):
        if not desired.allows_single(scenario_name):
            yield from _single_points(scenario_name, own)
            yield from _single_region(scenario_name, own, regions)
        yield from _mixed_scenario(scenario_name, own)
        yield from _unequal_domains(scenario_name, own, desired)
    for i, schedule in enumerate(desired.schedules):
        if schedule.scenario not in by_scenario:
            message = f"no group serves scenario {schedule.scenario}"
            yield Problem(f"schedules[{i}].scenario", message)
        elif any(group.pooling for group in by_scenario[schedule.scenario].values()):
            message = f"scenario {schedule.scenario} has pooling groups, which are never lent"
            yield Problem(f"schedules[{i}].scenario", message)


def _split_kv(path: str, service: Service) -> Iterator[Problem]:
    for option in KV_OPTIONS:
        told = {}
        for role in (Role.PREFILL, Role.DECODE):
            is_own = option in service.role_options.get(role, {})
            where = f"role_options.{role.value}" if is_own else "options"
            text = service.options_for(role).get(option, "")
            told[role] = OptionText(f"{path}.{where}.{option}", text)
        if problem := kv_split(option, told[Role.PREFILL], told[Role.DECODE]):
            own = next(t for t in reversed(told.values()) if ".role_options." in t.setting)
            yield Problem(own.setting, problem)


def _problems_of_group(
    path: str, group: Group, desired: Desired, regions: Collection[str]
) -> Iterator[Problem]:
    if path.startswith(f"groups.{CANARY_PREFIX}"):
        yield Problem(path, f"names that begin with {CANARY_PREFIX} are reserved for canaries")
    if group.scenario != DEFAULT_NAME and group.scenario not in desired.scenarios:
        yield Problem(f"{path}.scenario", f"there is no scenario {group.scenario}")
    yield from _problems_of_place(path, group, regions)
    if (group.prefill > 0) != (group.decode > 0):
        lacking = "decode" if group.prefill else "prefill"
        yield Problem(
            f"{path}.{lacking}", f"a group with {group.prefill}P:{group.decode}D cannot serve"
        )
    elif group.size == group.encoder:
        yield Problem(
            path, "the group has no instances: give prefill and decode, or fusion, or pooling"
        )
    elif group.pooling and group.size > group.pooling:
        yield Problem(f"{path}.pooling", "a group that pools has only pooling instances")


def _problems_of_place(path: str, group: Group, regions: Collection[str]) -> Iterator[Problem]:
    if group.region and group.region not in regions:
        yield Problem(f"{path}.region", f"there is no region {group.region}")
    named = {group.region}
    for i, name in enumerate(group.failover):
        if name not in regions:
            yield Problem(f"{path}.failover[{i}]", f"there is no region {name}")
        elif name in named:
            yield Problem(f"{path}.failover[{i}]", f"{name} is named twice")
        named.add(name)
    if group.failover and not group.region:
        yield Problem(f"{path}.failover", "needs the field region, too")
    if group.spans_regions and group.region:
        yield Problem(f"{path}.spans_regions", f"contradicts region {group.region}")


def _single_region(
    scenario: str, own: Mapping[str, Group], regions: Collection[str]
) -> Iterator[Problem]:
    """S58: the loss of one region must not be the loss of the scenario."""
    if len(regions) < 2 or any(not group.regions for group in own.values()):
        return
    used = {region for group in own.values() for region in group.regions}
    if len(used) < 2:
        yield Problem(
            f"groups.{next(iter(own))}",
            f"scenario {scenario} would be lost with region {used.pop()}; give a group of it a "
            "failover or"
            f" another region, or set scenarios.{scenario}.allow_single: true",
        )


def wanted_by_role(groups: Collection[Group]) -> dict[Role, int]:
    """How many instances of a scenario can do each role's work; a fusion instance does both
    phases.
    """
    if pooling := sum(group.pooling for group in groups):
        return {Role.POOLING: pooling}
    fusion = sum(group.fusion for group in groups)
    return {
        role: sum(group.num(role) for group in groups) + fusion
        for role in (Role.PREFILL, Role.DECODE)
    }


def _unequal_domains(
    scenario: str, own: Mapping[str, Group], desired: Desired
) -> Iterator[Problem]:
    """A change of ratio gives a member the other role, so members of both have equal sizes."""
    if not desired.scenarios.get(scenario, Scenario()).has_auto_ratio:
        return
    service = desired.service_of(next(iter(own.values())))
    prefill, decode = service.ranks_of(Role.PREFILL), service.ranks_of(Role.DECODE)
    if prefill != decode:
        yield Problem(
            f"scenarios.{scenario}.ratio",
            f"auto needs domains of one size: a prefill has {prefill} ranks, a decode {decode}",
        )


def _mixed_scenario(scenario: str, own: Mapping[str, Group]) -> Iterator[Problem]:
    """The groups of a scenario run one model: it makes answers, or vectors and scores."""
    of_pooling = [name for name, group in own.items() if group.pooling]
    if of_pooling and len(of_pooling) < len(own):
        yield Problem(
            f"groups.{of_pooling[0]}.pooling",
            f"scenario {scenario} also has groups of other roles: give this one its own scenario",
        )


def _single_points(scenario: str, own: Mapping[str, Group]) -> Iterator[Problem]:
    """S31: the loss of one instance must not be the loss of the scenario."""
    for role, wanted in wanted_by_role(own.values()).items():
        if wanted < MIN_PER_SCENARIO:
            yield Problem(
                f"groups.{next(iter(own))}",
                f"scenario {scenario} would depend on a single {role.value}; ask for "
                f"{MIN_PER_SCENARIO}, "
                f"or set scenarios.{scenario}.allow_single: true",
            )


def revision_of(service: Service, kv_transport: str) -> str:
    """A digest that is equal for instances that may exchange KV (S24).

    It covers what they load, how they keep KV, and how KV travels. It is empty if the service says
    nothing, because then the instances' own settings hold.
    """
    if service == Service():
        return ""
    plain = _plain(service)
    if isinstance(plain, dict) and not service.dp_size:
        del plain["dp_size"]  # a file that says nothing of domains keeps its revision
    told = json.dumps([plain, kv_transport], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()[:_REVISION_HEX]


def diff(before: Desired, after: Desired) -> list[Change]:
    """Every value that differs, by its path in a file.

    What comes or goes is listed without the values that are defaults.
    """
    kept, still = _same_schedules(before.schedules, after.schedules)
    old, new = (
        {path: leaf for path, leaf in _leaves("", each) if path.partition(".")[0] not in same}
        for each, same in ((before, kept), (after, still))
    )
    changes: list[Change] = []
    for path in sorted(old.keys() | new.keys()):
        was, is_now = old.get(path), new.get(path)
        texts = was.text if was else None, is_now.text if is_now else None
        is_left_out = (was is None or was.is_default) and (is_now is None or is_now.is_default)
        if texts[0] != texts[1] and not is_left_out:
            changes.append(Change(path, *texts))
    return changes


def _same_schedules(
    before: Sequence[ScheduleLine], after: Sequence[ScheduleLine]
) -> tuple[set[str], set[str]]:
    """The paths, before and after, of schedules that both have.

    A schedule is known by its content, not by its place.
    """
    places: dict[ScheduleLine, list[int]] = {}
    for i, line in enumerate(before):
        places.setdefault(_as_run(line), []).append(i)
    kept: set[str] = set()
    still: set[str] = set()
    for i, line in enumerate(after):
        if found := places.get(_as_run(line)):
            kept.add(f"schedules[{found.pop(0)}]")
            still.add(f"schedules[{i}]")
    return kept, still


def _as_run(line: ScheduleLine) -> ScheduleLine:
    return replace(line, at=" ".join(line.at.split()))


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        named = {(k.value if isinstance(k, Role) else str(k)): _plain(v) for k, v in value.items()}
        return dict(sorted(named.items()))
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


@dataclass(frozen=True, slots=True)
class _Leaf:
    text: str
    is_default: bool = False


def _leaves(path: str, value: object, default: object = None) -> Iterator[tuple[str, _Leaf]]:
    """All values by path, as a file writes them."""
    match value:
        case None | str() | int() | float():
            yield path, _Leaf(_scalar(value), value == default)
        case tuple():
            for i, each in enumerate(value):
                yield from _leaves(f"{path}[{i}]", each)
        case Mapping():
            for key, each in value.items():
                name = key.value if isinstance(key, Role) else str(key)
                yield from _leaves(_joined(path, name), each)
        case _:
            yield from _fields(path, value)


def _fields(path: str, value: object) -> Iterator[tuple[str, _Leaf]]:
    assert is_dataclass(value)
    match value:
        case Scenario(has_auto_ratio=is_auto):
            yield f"{path}.ratio", _Leaf("auto" if is_auto else "fixed", not is_auto)
        case ScheduleLine(action=action, num_groups=num):
            yield f"{path}.{action}", _Leaf(str(num))
    for each in fields(value):
        own = getattr(value, each.name)
        is_implied = each.name == "pool" and own == OFF_POOL
        if each.name not in _SAID_OTHERWISE and not is_implied:
            default = None if each.default is MISSING else each.default
            yield from _leaves(_joined(path, each.name), own, default)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _scalar(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return str(value)
