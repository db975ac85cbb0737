"""The desired state of the mesh as one value, its problems and its diffs (P/D-Serve 2.2, 3.3).

An operator writes the desired state as a file of services, scenarios, groups, schedules and
regions. A service is a model with its settings, and a scenario is a kind of requests for it. The
file has the number of instances of each role in each group, and names no instances. The reader of
the file (`pdmesh.desired_file`) checks names. `problems` finds errors that involve several parts.
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
CANARY_PREFIX: Final = "canary-"  # begins the ids of groups that an upgrade adds
_REVISION_HEX: Final = 12
# Fields that have another form in the file. For example, `ratio: auto` means has_auto_ratio.
_SAID_OTHERWISE: Final = frozenset({"has_auto_ratio", "action", "num_groups"})

Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    """A model as clients name it, and the files and settings of its instances.

    If a value is empty, each instance uses its own setting.
    """

    model: str = ""
    model_dir: str = ""
    manifests: Mapping[Role, str] = field(default_factory=dict)  # files differ by role (S17)
    options: Options = field(default_factory=dict)  # settings of the instances, by name
    role_options: Mapping[Role, Options] = field(default_factory=dict)
    release: str = ""  # change it when the same names refer to new files
    # The number of ranks of a data-parallel domain, which is one member of a group. The default for
    # a role is 1.
    dp_size: Mapping[Role, int] = field(default_factory=dict)

    def ranks_of(self, role: Role) -> int:
        return self.dp_size.get(role, 1)

    def options_for(self, role: Role) -> dict[str, str]:
        return {**self.options, **self.role_options.get(role, {})}


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """Limits for the trial of a new revision, which is a changed service (S24).

    An upgrade that exceeds a limit is rolled back. Groups get the new revision one after another. A
    group must be complete within `group_timeout_s`. It is then on trial for `soak_s`, before the
    next group gets the revision. During the trial, at most `max_failed_share` of the group's
    requests may fail. The prefill time T_p and the time per token may be at most `max_slowdown`
    times as long as with the old revision.
    """

    soak_s: float = 60.0
    group_timeout_s: float = 900.0
    max_failed_share: float = 0.01
    max_slowdown: float = 2.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of requests, with its own groups and SLOs.

    With `allow_single`, the scenario may depend on a single prefill, decode or region (S31, S58).
    With `has_auto_ratio`, the mesh adapts the ratio of prefills to decodes to the requests (S29).
    If `slo` is None, the gateways use their own settings.
    """

    service: str = DEFAULT_NAME
    allow_single: bool = False
    has_auto_ratio: bool = False
    upgrade: UpgradeLimits = field(default_factory=UpgradeLimits)
    slo: ScenarioSlo | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Instances that hand KV to each other and to no instance outside (S13).

    A group with pooling instances has no other instances, because its model makes no answers. The
    encoders of a group encode images for the instances that compute prompts. These instances can
    also encode images themselves, so encoders are optional.
    """

    scenario: str = DEFAULT_NAME
    prefill: int = 0
    decode: int = 0
    fusion: int = 0
    pooling: int = 0
    encoder: int = 0
    region: str = ""  # empty means any region that has room
    failover: tuple[str, ...] = ()  # other regions for the group while `region` has no room
    spans_regions: bool = False  # the group's KV may go from one region to another
    racks: tuple[str, ...] = ()  # the racks that its instances may be in. Empty means any.

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that the group may be in, the preferred one first. Empty means any."""
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
    """An action on groups of a scenario at scheduled times (S11, S21).

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
    regions: tuple[str, ...] = ()  # the regions that groups may name

    def num_instances(self, group: Group) -> int:
        """The number of instances of the group. A data-parallel domain has several."""
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
    """One value that differs. `before` is None for a new value, `after` for a removed value."""

    path: str
    before: str | None
    after: str | None


def problems(desired: Desired) -> Iterator[Problem]:
    """Finds unknown or reserved names, single points of failure, parts that cannot serve or be
    lent, and settings that do not fit together.
    """
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
    """Checks that the scenario survives the loss of one region (S58)."""
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
    """How many members of a scenario's groups can do the work of each role.

    A fusion instance counts as a prefill and as a decode.
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
    """Checks that prefills and decodes have equally many ranks, so that a member can change role.

    Only in a scenario with an automatic ratio does the mesh itself change the roles of members.
    """
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
    """Checks that either all groups of the scenario have pooling instances, or none."""
    of_pooling = [name for name, group in own.items() if group.pooling]
    if of_pooling and len(of_pooling) < len(own):
        yield Problem(
            f"groups.{of_pooling[0]}.pooling",
            f"scenario {scenario} also has groups of other roles: give this one its own scenario",
        )


def _single_points(scenario: str, own: Mapping[str, Group]) -> Iterator[Problem]:
    """Checks that the scenario survives the loss of one instance (S31)."""
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

    The digest covers the KV transport and all values of the service, such as the model and its
    options. It is empty if the service has no values, because the instances then use their own
    settings.
    """
    if service == Service():
        return ""
    plain = _plain(service)
    if isinstance(plain, dict) and not service.dp_size:
        del plain["dp_size"]  # a file without domains keeps the revision that it always had
    told = json.dumps([plain, kv_transport], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()[:_REVISION_HEX]


def diff(before: Desired, after: Desired) -> list[Change]:
    """Every value that differs, sorted by its path in the file.

    For parts that are added or removed, default values are left out.
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
    """Find the schedules that are in both lists, in any order.

    Returns their paths in `before` and their paths in `after`.
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
    """All values by path, in the form that they have in the file."""
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
