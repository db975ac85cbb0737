"""Finds the smallest deployments that meet the goals: one of P/D, and one of fusion.

P/D has prefill and decode on different instances. Its first tokens depend only on the prefills, and
its other tokens only on the decodes. So each pool is as small as its own goal allows. A fusion
instance does both, so both goals apply to one pool, and the search also chooses the size of its
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pdmesh.core.moves.move_refusal import MAX_BUSY, MIN_PER_SCENARIO
from pdmesh.core.sizing.deployment import (
    FUSION_CHUNKS,
    MAX_LINK,
    PREFILL_CHUNK,
    PREFILL_SLOTS,
    Deployment,
    PoolSize,
    decode_times,
    fused,
    fused_of,
    held_by,
    link_busy,
    most_running,
    pair_of,
    prefill_times,
    slots_for,
)
from pdmesh.core.sizing.instance_kind import InstanceKind
from pdmesh.core.sizing.traffic import Goals, Traffic

MAX_COUNT: Final = 1024  # the most instances of a role
_ALONE: Final = 1e-3  # at this share of the rate, no request waits for another


@dataclass(frozen=True, slots=True)
class NotPossible:
    """No number of instances meets the goals. `reason` says what is too slow or too large."""

    reason: str


@dataclass(frozen=True, slots=True)
class Workload:
    """The load and the goals of a deployment.

    Each role has at least `least` instances, so that one may fail.
    """

    traffic: Traffic
    goals: Goals
    kinds: tuple[InstanceKind, ...]
    least: int = MIN_PER_SCENARIO
    max_busy: float = MAX_BUSY
    chunks: tuple[int, ...] = FUSION_CHUNKS

    def at(self, rate_per_s: float) -> Workload:
        return replace(self, traffic=self.traffic.at(rate_per_s))


def smallest_pair(wanted: Workload) -> Deployment | NotPossible:
    """The P/D deployment with the fewest devices."""
    pairs, why_not = list[tuple[PoolSize, PoolSize]](), ""
    for kind in wanted.kinds:
        prefill = _prefill_pool(wanted, kind)
        if isinstance(prefill, NotPossible):
            why_not = prefill.reason
            continue
        for other in wanted.kinds:
            decode = _decode_pool(wanted, other, kind)
            if isinstance(decode, NotPossible):
                why_not = decode.reason
            else:
                pairs.append((replace(prefill, slots=PREFILL_SLOTS), decode))
    if not pairs:
        return NotPossible(why_not)
    prefill, decode = min(pairs, key=lambda p: (sum(e.num_gpus for e in p), p[0].kind.tp))
    found = pair_of(prefill, decode, wanted.traffic, wanted.goals)
    most = most_running(decode.kind, held_by(wanted.traffic))
    decode = replace(decode, slots=slots_for(found.seen.batch, most))
    return replace(found, pools=(prefill, decode))


def smallest_fusion(wanted: Workload) -> Deployment | NotPossible:
    found, why_not = list[Deployment](), ""
    for kind in wanted.kinds:
        for chunk in wanted.chunks:
            most = min((each.num_gpus for each in found), default=MAX_COUNT * kind.tp) // kind.tp
            pool = _fusion_pool(wanted, kind, chunk, most)
            if isinstance(pool, NotPossible):
                why_not = pool.reason
            else:
                found.append(fused(pool, wanted.traffic, wanted.goals))
    if not found:
        return NotPossible(why_not)
    goals = wanted.goals
    best = min(
        found,
        key=lambda d: (
            d.num_gpus,
            max(d.seen.ttft_s / goals.ttft_s, d.seen.tpot_s / goals.tpot_s),
        ),
    )
    (pool,) = best.pools
    most = most_running(pool.kind, held_by(wanted.traffic))
    return replace(best, pools=(replace(pool, slots=slots_for(best.seen.batch, most)),))


Found = PoolSize | NotPossible


def _prefill_pool(wanted: Workload, kind: InstanceKind) -> Found:
    traffic, goals = wanted.traffic, wanted.goals
    longest = max(r.num_prompt for r in traffic.requests)
    if longest > kind.kv_tokens:
        return NotPossible(_too_long(longest, kind))
    slow = prefill_times(PoolSize(kind, 1), traffic.at(traffic.rate_per_s * _ALONE))
    if slow.exceeds(goals.ttft_s) > 1 - goals.share:
        return NotPossible(_slow_prompt(slow.quantile_s(goals.share), goals, kind))

    def is_enough(count: int) -> bool:
        return _prefills_hold(PoolSize(kind, count), wanted)

    return _fewest(kind, PREFILL_CHUNK, wanted.least, is_enough)


def _decode_pool(wanted: Workload, kind: InstanceKind, sender: InstanceKind) -> Found:
    traffic, goals = wanted.traffic, wanted.goals
    if traffic.longest > kind.kv_tokens:
        return NotPossible(_too_long(traffic.longest, kind))
    alone = decode_times(PoolSize(kind, 1), sender, traffic.at(traffic.rate_per_s * _ALONE))
    if alone.exceeds(goals.tpot_s) > 1 - goals.share:
        return NotPossible(_slow_token(alone.quantile_s(goals.share), goals, kind))

    def is_enough(count: int) -> bool:
        return _decodes_hold(PoolSize(kind, count), sender, wanted)

    return _fewest(kind, PREFILL_CHUNK, wanted.least, is_enough)


def _fusion_pool(wanted: Workload, kind: InstanceKind, chunk: int, most: int) -> Found:
    """The smallest pool of fusion instances, if it has at most `most` of them.

    With more instances, it would need more devices than another kind.
    """
    traffic, goals = wanted.traffic, wanted.goals
    if traffic.longest > kind.kv_tokens:
        return NotPossible(_too_long(traffic.longest, kind))
    alone = fused(PoolSize(kind, 1, chunk), traffic.at(traffic.rate_per_s * _ALONE), goals).seen
    if alone.ttft_s > goals.ttft_s:
        return NotPossible(_slow_prompt(alone.ttft_s, goals, kind))
    if alone.tpot_s > goals.tpot_s:
        return NotPossible(_slow_token(alone.tpot_s, goals, kind))

    def is_enough(count: int) -> bool:
        return _fusion_holds(PoolSize(kind, count, chunk), wanted)

    if most < MAX_COUNT and (most < wanted.least or not is_enough(most)):
        return NotPossible("another kind needs fewer devices")

    return _fewest(kind, chunk, wanted.least, is_enough)


def _prefills_hold(pool: PoolSize, wanted: Workload) -> bool:
    times = prefill_times(pool, wanted.traffic)
    has_link = link_busy(pool.kind, pool.count, wanted.traffic) <= MAX_LINK
    is_kept = times.exceeds(wanted.goals.ttft_s) <= 1 - wanted.goals.share
    return is_kept and has_link and times.busy <= wanted.max_busy


def _decodes_hold(pool: PoolSize, sender: InstanceKind, wanted: Workload) -> bool:
    times = decode_times(pool, sender, wanted.traffic)
    has_link = link_busy(pool.kind, pool.count, wanted.traffic) <= MAX_LINK
    is_kept = times.exceeds(wanted.goals.tpot_s) <= 1 - wanted.goals.share
    return is_kept and has_link and times.batch <= wanted.max_busy * times.most


def _fusion_holds(pool: PoolSize, wanted: Workload) -> bool:
    first, following, mixed = fused_of(pool, wanted.traffic)
    has_room = mixed <= wanted.max_busy and following.batch <= wanted.max_busy * following.most
    late = first.exceeds(wanted.goals.ttft_s)
    slow = following.exceeds(wanted.goals.tpot_s)
    return has_room and max(late, slow) <= 1 - wanted.goals.share


def holds(deployment: Deployment, wanted: Workload) -> bool:
    """Whether the deployment meets the goals, and no instance is too busy."""
    if deployment.is_fusion:
        return _fusion_holds(deployment.pools[0], wanted)
    prefill, decode = deployment.pools
    return _prefills_hold(prefill, wanted) and _decodes_hold(decode, prefill.kind, wanted)


def _fewest(kind: InstanceKind, chunk: int, least: int, is_enough: Callable[[int], bool]) -> Found:
    """The least count that is enough, found by doubling and then halving.

    A larger count is never worse.
    """
    high = least
    while not is_enough(high):
        high *= 2
        if high > MAX_COUNT:
            return NotPossible(f"more than {MAX_COUNT} instances of {kind.tp} devices are needed")
    low = max(least - 1, high // 2) if high > least else least - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return PoolSize(kind, high, chunk)


def _too_long(tokens: int, kind: InstanceKind) -> str:
    return (
        f"the longest request of {tokens} tokens does not fit the KV of {kind.tp} devices,"
        f" {kind.kv_tokens} tokens"
    )


def _slow_prompt(seconds: float, goals: Goals, kind: InstanceKind) -> str:
    return (
        f"without any queue, {goals.share:.0%} of the first tokens come within {seconds:.2f} s on"
        f" {kind.tp} devices, not within {goals.ttft_s:g} s"
    )


def _slow_token(seconds: float, goals: Goals, kind: InstanceKind) -> str:
    return (
        f"without any other request, a token takes {1000 * seconds:.1f} ms on {kind.tp} devices,"
        f" not {1000 * goals.tpot_s:g} ms"
    )
