"""Scores instances by the paper's formula (2), a weighted sum of prefix, latency and load (S107).

The policy `weighted_sum` uses it as a baseline for the default policy. The formula's weights fit
one trace of requests well and other traces less well (ADR 0043).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.policies import Known, Query

# A full instance will reject the request. With this penalty, it ranks behind nearly every instance
# with a free slot.
_FULL: Final = 4.0


def prefix_and_latency(query: Query, instances: Sequence[Instance], known: Known) -> list[float]:
    """A sum of these terms:

      alpha*local/total + beta*max(0, remote-local)/total + chat + adapter
      - gamma*latency/max_latency - load*used/slots - spread*cached/blocks*(1-local/total)

    `total` is the number of blocks of the prompt, and `local` the number that the instance holds.
    `remote` is the number that it could hold after fetching from other instances. Latency is the
    wait for earlier prompts plus the predicted time of this prefill. The last term sends a new
    prefix to an instance where it evicts nothing. Once all caches are full, this term is the same
    for all instances without the prefix. From the score of a full instance, `_FULL` is subtracted.
    """
    weights, now = known.weights, known.now
    reach = known.peers.reach if known.peers.runs else None
    local_of, num_tokens = known.matches.get, query.num_prompt_tokens
    total = max(1, len(query.block_hashes))
    predicted: dict[tuple[str, float], float] = {}
    latencies: list[float] = []
    scores: list[float] = []
    alpha, beta, load = weights.alpha / total, weights.beta / total, weights.load
    for instance in instances:
        local = local_of(instance.id, 0)
        used, slots = instance.num_slots_used + instance.num_booked, instance.num_slots or 1
        score = alpha * local - load * used / slots
        if used >= slots:
            score -= _FULL
        held: float = local
        if weights.spread and local < total:
            share = known.num_cached(instance.id) / (instance.identity.num_kv_blocks or 1)
            score -= weights.spread * min(1.0, share) * (1 - local / total)
        if reach is not None and instance.identity.fetches_from_peers:
            held = max(local, reach(int(local)))
            score += beta * (held - local)
        key = (instance.kind, held)
        latency = predicted.get(key)
        if latency is None:
            reused = min(round(held * instance.identity.block_size), max(0, num_tokens - 1))
            latency = known.predictor.fit(instance.kind).predict_s(num_tokens, reused)
            predicted[key] = latency
        if instance.available_at > now:
            latency += instance.available_at - now
        latencies.append(latency)
        scores.append(score)
    scale = weights.gamma / max(latencies, default=1.0)
    scores = [score - scale * latency for score, latency in zip(scores, latencies, strict=True)]
    if known.affine or query.adapter:
        _prefer_homes(query, instances, known, scores)
    return scores


def _prefer_homes(
    query: Query, instances: Sequence[Instance], known: Known, scores: list[float]
) -> None:
    """Add to the scores of instances that served the chat or have loaded the adapter."""
    for i, instance in enumerate(instances):
        scores[i] += known.weights.chat * (instance.id in known.affine)
        scores[i] += known.weights.adapter * (query.adapter in instance.identity.adapters)
