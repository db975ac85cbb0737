"""Measures how busy the prefills and decodes of groups are over a window (S28, S29).

Moves of instances between roles and groups are planned and checked by these loads. The load of a
prefill is the share of time in which its engine computes. If the prefill reports no such time, its
load is the share of its slots in use. This share overstates the load, because a prompt keeps its
slot until a decode has the KV (S41). With too few decodes, prefills look full by their slots, and
would not be allowed to become decodes. The load of any other instance is the share in use of its
slots or its KV blocks, whichever is larger. If an instance had not reported when a sample was
taken, the load of its role is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Instance


@dataclass(slots=True)
class _Meter:
    """One instance since the window began. `taken` is the sum of the used shares of all samples."""

    group_id: str
    role: Role
    incarnation: int
    computed_before_s: float
    num_samples: int = 0
    taken: float = 0.0
    is_known: bool = True
    computed_s: float = 0.0

    def busy(self, span_s: float) -> float | None:
        if not self.is_known:
            return None
        computed_s = self.computed_s - self.computed_before_s
        if self.role is Role.PREFILL and span_s > 0 and computed_s > 0:
            return min(1.0, computed_s / span_s)
        return self.taken / self.num_samples


@dataclass(slots=True)
class RoleLoads:
    """The loads of the last window. Call `sample` often, and `close` at the end of each window.

    Until the first window is closed, `busy` uses that window's samples so far.
    """

    _meters: dict[str, _Meter] = field(default_factory=dict)
    _closed: dict[str, _Meter] | None = None
    _closed_span_s: float = 0.0
    _began: float | None = None
    _now: float = 0.0
    _by_cell: dict[tuple[str, Role], list[_Meter]] | None = None  # the meters that `busy` reads

    def sample(self, instances: Iterable[Instance], now: float) -> None:
        """Take a sample of all usable instances."""
        self._began = now if self._began is None else self._began
        self._now = now
        if self._closed is None:
            self._by_cell = None
        for instance in instances:
            identity = instance.identity
            if identity.role is Role.NONE or not instance.is_usable:
                continue
            meter = self._meters.get(instance.id)
            as_known = (identity.group_id, identity.role, identity.incarnation)
            if meter is None or (meter.group_id, meter.role, meter.incarnation) != as_known:
                meter = _Meter(*as_known, instance.computed_s)
                self._meters[instance.id] = meter
            meter.num_samples += 1
            meter.taken += _taken(instance)
            meter.computed_s = instance.computed_s
            meter.is_known &= instance.reported_at is not None and instance.num_slots > 0

    def close(self) -> None:
        """End the window at the last sample. `busy` uses this window until the next one ends."""
        self._by_cell = None
        self._closed = {i: meter for i, meter in self._meters.items() if meter.num_samples}
        self._meters = {
            i: _Meter(m.group_id, m.role, m.incarnation, m.computed_s, computed_s=m.computed_s)
            for i, m in self._closed.items()
        }
        self._closed_span_s = self._now - self._began if self._began is not None else 0.0
        self._began = self._now

    def busy(self, group_ids: Collection[str], role: Role) -> float | None:
        """The mean load of a role's instances in the groups, 0..1.

        None if there are no instances, or if one of them had not reported at some sample.
        """
        span_s = self._closed_span_s
        if self._closed is None:
            span_s = self._now - self._began if self._began is not None else 0.0
        if self._by_cell is None:
            self._by_cell = {}
            for meter in (self._meters if self._closed is None else self._closed).values():
                if meter.num_samples:
                    self._by_cell.setdefault((meter.group_id, meter.role), []).append(meter)
        own = [m for group_id in group_ids for m in self._by_cell.get((group_id, role), ())]
        shares = [meter.busy(span_s) for meter in own]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None


def _taken(instance: Instance) -> float:
    """The used share of an instance's slots or, if larger, of its KV blocks.

    For a prefill, only slots count.
    """
    slots = instance.used_slots() / instance.num_slots if instance.num_slots else 0.0
    num_blocks = instance.identity.num_kv_blocks
    if instance.identity.role is Role.PREFILL or not num_blocks:
        return min(1.0, slots)
    return min(1.0, max(slots, 1 - instance.num_kv_blocks_free / num_blocks))
