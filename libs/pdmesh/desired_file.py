"""Reads the desired state, the groups that the mesh should have, from a YAML file.

Only the first error is reported, with its line and field. The file may have plain mappings, lists
and scalars only. Anchors, tags and further documents are refused, so that a small file cannot
become a large structure. libyaml parses the file, because the parser in Python takes fifteen times
as long. With the slower parser and the longest allowed file, a master could not renew its lease in
time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import yaml

from pdmesh.core.groups.desired import (
    DEFAULT_NAME,
    SERVING_ROLES,
    Desired,
    Group,
    Scenario,
    ScheduleLine,
    Service,
    UpgradeLimits,
    problems,
)
from pdmesh.core.groups.domains.presets import PRESETS, ParallelPreset
from pdmesh.core.model import Role
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import OFF_POOL, TRAINING_POOL
from pdmesh.core.moves.schedule import MAX_ENTRIES, ScheduleAction
from pdmesh.core.request.slo import ScenarioSlo
from pdmesh.errors import InvalidRequest

MAX_BYTES: Final = 1 << 20
MAX_COUNT: Final = 4096  # the most instances of a role in a group, and copies of a group
MAX_GROUPS: Final = 4096
MAX_RANKS: Final = 256  # the most instances of a data-parallel domain
MAX_EVENTS: Final = 1 << 17  # names, values, and both ends of mappings and lists
_MAX_DEPTH: Final = 8
_DAY_S: Final = 86_400.0
_MAX_DEFAULT_TEXT: Final = 4096  # characters
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OPTION: Final = re.compile(r"[a-z][a-z0-9_]*")
_NESTED: Final = "engine_args"  # the option whose values may be mappings and lists
_TP: Final = "tensor_parallel_size"
_GENERATING: Final = (Role.PREFILL, Role.DECODE, Role.FUSION)  # roles that may form domains
_TRUE: Final = {"true": True, "false": False}
_ROLES: Final = {role.value: role for role in SERVING_ROLES}

T = TypeVar("T")


def read(text: str) -> Desired:
    """Read the text.

    Raises InvalidRequest. Its message has the line, and its `field` is the path in the file.
    """
    root = _compose(text)
    if root is None:
        return Desired()
    reader = _Reader(root, "")
    parts = reader.parts("services", "scenarios", "groups", "schedules", "regions")
    desired = Desired(
        services=_named(parts.get("services"), _service),
        scenarios=_named(parts.get("scenarios"), _scenario),
        groups=_groups(parts.get("groups")),
        schedules=_schedules(parts.get("schedules")),
        regions=tuple(each.name() for each in _items(parts.get("regions"))),
    )
    for problem in problems(desired):
        raise _wrong(problem.path, _line_of(root, problem.path), problem.message)
    return desired


# --- the parts ------------------------------------------------------------------------------------


def _service(reader: _Reader) -> Service:
    parts = reader.parts(
        "model", "model_dir", "manifests", "options", "role_options", "release", "dp_size",
        "parallel",
    )  # fmt: skip
    options = _options(parts.get("options"))
    role_options = _by_role(parts.get("role_options"), _options)
    dp_size = _of_roles(parts.get("dp_size"), lambda each: each.number(MAX_RANKS, least=1))
    for role, preset in _of_roles(parts.get("parallel"), _preset).items():
        dp_size.setdefault(role, preset.dp_size)
        own = role_options.setdefault(role, {})
        if _TP not in options:
            own.setdefault(_TP, str(preset.tensor_parallel_size))
    return Service(
        model=_text(parts, "model"),
        model_dir=_text(parts, "model_dir"),
        manifests=_by_role(parts.get("manifests"), lambda each: each.text()),
        options=options,
        role_options=role_options,
        release=_text(parts, "release"),
        dp_size={role: size for role, size in dp_size.items() if size > 1},
    )


def _preset(reader: _Reader) -> ParallelPreset:
    if (preset := PRESETS.get(reader.text())) is None:
        raise reader.wrong(f"must be one of {', '.join(PRESETS)}")
    return preset


def _of_roles(reader: _Reader | None, read_one: Callable[[_Reader], T]) -> dict[Role, T]:
    """Read a value by role. A single value applies to all roles that generate text."""
    if reader is None:
        return {}
    if not isinstance(reader.node, _Mapping):
        return dict.fromkeys(_GENERATING, read_one(reader))
    parts = reader.parts(*(role.value for role in _GENERATING))
    return {_ROLES[name]: read_one(each) for name, each in parts.items()}


def _scenario(reader: _Reader) -> Scenario:
    parts = reader.parts("service", "allow_single", "ratio", "upgrade", "slo")
    allow, ratio = parts.get("allow_single"), parts.get("ratio")
    if ratio is not None and ratio.text() not in ("fixed", "auto"):
        raise ratio.wrong("must be fixed or auto")
    is_auto = ratio is not None and ratio.text() == "auto"
    upgrade = _upgrade(parts["upgrade"]) if "upgrade" in parts else UpgradeLimits()
    slo = _slo(parts["slo"]) if "slo" in parts else None
    return Scenario(
        _name(parts, "service"), allow.flag() if allow else False, is_auto, upgrade, slo
    )


def _slo(reader: _Reader) -> ScenarioSlo:
    parts = reader.parts("ttft_s", "ttft_s_per_1k_tokens", "default_text")
    if "ttft_s" not in parts:
        raise reader.wrong("needs ttft_s")
    per_1k = parts.get("ttft_s_per_1k_tokens")
    text = parts["default_text"].text() if "default_text" in parts else None
    if text is not None and len(text) > _MAX_DEFAULT_TEXT:
        raise parts["default_text"].wrong(f"has more than {_MAX_DEFAULT_TEXT} characters")
    return ScenarioSlo(
        parts["ttft_s"].amount(0.001, _DAY_S), per_1k.amount(0.0, _DAY_S) if per_1k else 0.0, text
    )


def _upgrade(reader: _Reader) -> UpgradeLimits:
    bounds = {
        "soak_s": (0.0, _DAY_S),
        "group_timeout_s": (1.0, _DAY_S),
        "max_failed_share": (0.0, 1.0),
        "max_slowdown": (1.0, 1000.0),
    }
    parts = reader.parts(*bounds)
    return UpgradeLimits(**{name: each.amount(*bounds[name]) for name, each in parts.items()})


def _groups(reader: _Reader | None) -> dict[str, Group]:
    """Read the groups by name. With `count: 3`, group chat becomes chat-0, chat-1 and chat-2."""
    groups: dict[str, Group] = {}
    for name, each in reader.children() if reader else ():
        parts = each.parts(
            "scenario",
            "prefill",
            "decode",
            "fusion",
            "pooling",
            "encoder",
            "count",
            "region",
            "failover",
            "spans_regions",
            "racks",
        )
        group = Group(
            scenario=_name(parts, "scenario"),
            prefill=_number(parts, "prefill"),
            decode=_number(parts, "decode"),
            fusion=_number(parts, "fusion"),
            pooling=_number(parts, "pooling"),
            encoder=_number(parts, "encoder"),
            region=_name(parts, "region", ""),
            failover=tuple(name.name() for name in _items(parts.get("failover"))),
            spans_regions=parts["spans_regions"].flag() if "spans_regions" in parts else False,
            racks=tuple(name.name() for name in _items(parts.get("racks"))),
        )
        count = parts["count"].number(MAX_COUNT) if "count" in parts else None
        group_ids = [name] if count is None else [f"{name}-{i}" for i in range(count)]
        for group_id in group_ids:
            if group_id in groups:
                raise each.wrong(f"its copy {group_id} has the same name as another group")
            groups[group_id] = group
        if len(groups) > MAX_GROUPS:
            raise each.wrong(f"more than {MAX_GROUPS} groups")
    return groups


def _schedules(reader: _Reader | None) -> tuple[ScheduleLine, ...]:
    items = _items(reader)
    if reader is not None and len(items) > MAX_ENTRIES:
        raise reader.wrong(f"more than {MAX_ENTRIES} schedules")
    return tuple(_schedule(each) for each in items)


def _schedule(reader: _Reader) -> ScheduleLine:
    actions = [what.value for what in ScheduleAction]
    parts = reader.parts("at", "scenario", "pool", *actions)
    asked = [name for name in actions if name in parts]
    if "at" not in parts or len(asked) != 1:
        raise reader.wrong("needs at, and one of add, remove, lend and reclaim")
    action = asked[0]
    at = parts["at"].text()
    try:
        Cron.parse(at)
    except ValueError as exc:
        raise parts["at"].wrong(f"is not a cron expression: {exc}") from exc
    return ScheduleLine(
        at=at,
        scenario=_name(parts, "scenario"),
        action=action,
        num_groups=parts[action].number(MAX_COUNT, least=1),
        pool=_pool(parts, action),
    )


def _pool(parts: Mapping[str, _Reader], action: str) -> str:
    if action in (ScheduleAction.ADD, ScheduleAction.REMOVE):
        if "pool" in parts:
            raise parts["pool"].wrong(f"{action} takes no pool; only lend and reclaim do")
        return OFF_POOL
    pool = _name(parts, "pool", TRAINING_POOL)
    if pool == OFF_POOL:
        raise parts["pool"].wrong(f"{OFF_POOL} is reserved for removed groups")
    return pool


def _options(reader: _Reader | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, each in reader.children(_OPTION) if reader else ():
        options[name] = each.json() if name == _NESTED else each.text_or_json()
    return options


def _by_role(reader: _Reader | None, read_one: Callable[[_Reader], T]) -> dict[Role, T]:
    parts = reader.parts(*_ROLES) if reader else {}
    return {_ROLES[name]: read_one(each) for name, each in parts.items()}


def _named(reader: _Reader | None, read_one: Callable[[_Reader], T]) -> dict[str, T]:
    return {name: read_one(each) for name, each in reader.children()} if reader else {}


def _items(reader: _Reader | None) -> list[_Reader]:
    return reader.items() if reader else []


def _text(parts: Mapping[str, _Reader], name: str) -> str:
    return parts[name].text() if name in parts else ""


def _name(parts: Mapping[str, _Reader], name: str, default: str = DEFAULT_NAME) -> str:
    return parts[name].name() if name in parts else default


def _number(parts: Mapping[str, _Reader], name: str) -> int:
    return parts[name].number(MAX_COUNT) if name in parts else 0


# --- nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scalar:
    line: int
    value: str
    is_plain: bool  # not quoted


@dataclass(frozen=True, slots=True)
class _List:
    line: int
    values: list[_Node]


@dataclass(frozen=True, slots=True)
class _Mapping:
    """`parts` has each name, followed by its value."""

    line: int
    parts: list[_Node]

    def pairs(self) -> Iterator[tuple[_Node, _Node]]:
        parts = iter(self.parts)
        return zip(parts, parts, strict=True)


_Node = _Scalar | _List | _Mapping


@dataclass(frozen=True, slots=True)
class _Reader:
    """A node and its path in the file.

    The methods that read the node raise InvalidRequest if it is not what they expect.
    """

    node: _Node
    path: str

    def wrong(self, message: str) -> InvalidRequest:
        return _wrong(self.path, self.node.line, message)

    def children(self, pattern: re.Pattern[str] = _NAME) -> list[tuple[str, _Reader]]:
        if _is_nothing(self.node):
            return []
        if not isinstance(self.node, _Mapping):
            raise self.wrong("must be a mapping of names")
        found: dict[str, _Reader] = {}
        for key, value in self.node.pairs():
            name = key.value if isinstance(key, _Scalar) else ""
            child = _Reader(value, f"{self.path}.{name}" if self.path else name)
            if not pattern.fullmatch(name):
                raise _wrong(child.path, key.line, f"a name must match {pattern.pattern}")
            if name in found:
                raise _wrong(child.path, key.line, "is there twice")
            found[name] = child
        return list(found.items())

    def parts(self, *known: str) -> dict[str, _Reader]:
        found = dict(self.children(_OPTION))
        for name, each in found.items():
            if name not in known:
                raise each.wrong(f"is unknown; known names are {', '.join(known)}")
        return found

    def items(self) -> list[_Reader]:
        if _is_nothing(self.node):
            return []
        if not isinstance(self.node, _List):
            raise self.wrong("must be a list")
        return [_Reader(each, f"{self.path}[{i}]") for i, each in enumerate(self.node.values)]

    def text(self) -> str:
        if not isinstance(self.node, _Scalar):
            raise self.wrong("must be a plain value")
        return self.node.value

    def text_or_json(self) -> str:
        """The text of a plain value, or a JSON object for a mapping of plain values."""
        if isinstance(self.node, _Mapping):
            return json.dumps({name: each.text() for name, each in self.children(_OPTION)})
        return self.text()

    def json(self) -> str:
        """A JSON object for a mapping of any values."""
        return json.dumps({name: each.value() for name, each in self.children(_OPTION)})

    def value(self) -> object:
        if isinstance(self.node, _Mapping):
            return {name: each.value() for name, each in self.children(_OPTION)}
        if isinstance(self.node, _List):
            return [each.value() for each in self.items()]
        if self.node.is_plain:
            with contextlib.suppress(ValueError):
                return json.loads(self.node.value)
        return self.node.value

    def name(self) -> str:
        text = self.text()
        if not _NAME.fullmatch(text):
            raise self.wrong(f"a name must match {_NAME.pattern}")
        return text

    def flag(self) -> bool:
        value = _TRUE.get(self.text())
        if value is None:
            raise self.wrong("must be true or false")
        return value

    def number(self, most: int, least: int = 0) -> int:
        text = self.text()
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise self.wrong(f"must be a whole number from {least} to {most}")
        return int(text)

    def amount(self, least: float, most: float) -> float:
        text = self.text()
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not least <= float(text) <= most:
            raise self.wrong(f"must be a number from {least:g} to {most:g}")
        return float(text)


def _compose(text: str) -> _Node | None:
    """Parse the text. Returns None if the document is empty."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise InvalidRequest(f"the desired state is longer than {MAX_BYTES} bytes", field="text")
    try:
        return _built(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = mark.line + 1 if mark else 1  # if the text ends too early, the line after its end
        raise _wrong("", min(line, len(text.splitlines())), exc.problem or "is not YAML") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise _wrong("", 1, "is not YAML text") from exc


def _built(text: str) -> _Node | None:
    """Build the nodes from the parser's events, and stop at the first event beyond a bound.

    PyYAML's own nodes are not used, because each of them has two objects for its place in the text.
    With the longest file, the garbage collector would stop all threads for seconds to visit these
    objects.
    """
    tops: list[_Node] = []  # the top node of each document
    open_ones: list[list[_Node]] = [tops]
    for number, event in enumerate(yaml.parse(text, Loader=yaml.CSafeLoader)):
        line = event.start_mark.line + 1
        if number >= MAX_EVENTS:
            raise _wrong("", line, f"more than {MAX_EVENTS} names and values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _wrong("", line, "anchors and aliases are not supported")
        if getattr(event, "tag", None):
            raise _wrong("", line, "tags are not supported")
        match event:
            case yaml.DocumentStartEvent() if tops:
                raise _wrong("", line, "a second document is not supported")
            case yaml.ScalarEvent():
                open_ones[-1].append(_Scalar(line, event.value, not event.style))
            case yaml.CollectionStartEvent():
                if len(open_ones) > _MAX_DEPTH:
                    raise _wrong("", line, "is nested too deeply")
                inner: list[_Node] = []
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                open_ones[-1].append(_Mapping(line, inner) if is_mapping else _List(line, inner))
                open_ones.append(inner)
            case yaml.CollectionEndEvent():
                open_ones.pop()
    return tops[0] if tops else None


def _wrong(path: str, line: int, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"line {line}: {path + ': ' if path else ''}{message}", field=path or "text"
    )


def _line_of(root: _Node, path: str) -> int:
    """The line of the deepest part of `path` that is in the file.

    For a group that `count` made, this is the line of the entry with the count.
    """
    node, line = root, 1
    for name in re.split(r"[.\[\]]+", path.rstrip("]")):
        child = _child(node, name) or _child(node, name.rpartition("-")[0])
        if child is None:
            break
        line, node = child
    return line


def _child(node: _Node, name: str) -> tuple[int, _Node] | None:
    if isinstance(node, _Mapping):
        named = ((k, v) for k, v in node.pairs() if isinstance(k, _Scalar) and k.value == name)
        return next(((k.line, v) for k, v in named), None)
    if isinstance(node, _List) and name.isdecimal() and int(name) < len(node.values):
        return node.values[int(name)].line, node.values[int(name)]
    return None


def _is_nothing(node: _Node) -> bool:
    return isinstance(node, _Scalar) and node.value == "" and node.is_plain
