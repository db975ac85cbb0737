"""Families of requests by which placement is judged: requests as in public traces, and other kinds.

All block names stand for `BLOCK` tokens, as in Mooncake's traces. Two families imitate traces that
are not on this machine. Their lengths, rate and share of prefixes follow the numbers that
Mooncake's authors publish. The tool & agent trace has 8,596 tokens in, 182 out, and 59 % of blocks
seen before. The synthetic trace has 15,325 in, 149 out, and 66 %.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from loadtests.traffic.workloads import (
    Arrival,
    block_name,
    long_prompts,
    scaled,
    short_chats,
)
from pdmesh.core.kv.tiers.session_holds import SessionState

BLOCK: Final = 512
_TICK_S: Final = 3.0


def toolagent(
    seed: int, count: int, rate_per_s: float = 6.7, num_recent: int = 60
) -> list[Arrival]:
    """Tool calls. Their prompts begin with long definitions of tools, which many calls share. Some
    calls belong to long sessions.

    Only the `num_recent` latest sessions may continue.
    """
    rng = random.Random(seed)
    heads = [2 + int(rng.triangular(0, 22, 10)) for _ in range(40)]
    popular = [1 / (rank + 1) for rank in range(len(heads))]
    sessions: list[tuple[int, int, int]] = []  # (head, id, blocks)
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        at_s = now // _TICK_S * _TICK_S
        if sessions and rng.random() < 0.25:
            place = rng.randrange(max(0, len(sessions) - num_recent), len(sessions))
            head, name, length = sessions[place]
            length += 1 + int(rng.expovariate(1 / 3))
            sessions[place] = (head, name, length)
        else:
            (head,) = rng.choices(range(len(heads)), popular)
            name, length = number, int(rng.lognormvariate(0.6, 1.4))
            sessions.append((head, name, length))
        own = min(length, 230)
        names = [*_named(-1 - head, heads[head]), *_named(name, own)]
        num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
        num_output = max(1, int(rng.expovariate(1 / 182)))
        arrivals.append(Arrival(at_s, num_tokens, num_output, tuple(names)))
    return arrivals


def documents(seed: int, count: int, rate_per_s: float = 1.5) -> list[Arrival]:
    """Questions about long documents and multi-turn chats, as in Mooncake's synthetic trace."""
    rng = random.Random(seed)
    lengths = [min(240, 3 + int(rng.lognormvariate(2.7, 0.9))) for _ in range(count // 4)]
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        document = max(0, min(number // 4, len(lengths) - 1) - int(rng.expovariate(1 / 12)))
        own = int(rng.expovariate(1 / 3))
        names = (*_named(-1 - document, lengths[document]), *_named(number, own))
        num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
        arrivals.append(Arrival(now, num_tokens, 1 + int(rng.expovariate(1 / 149)), names))
    return arrivals


def hot_prefixes(
    seed: int, count: int, rate_per_s: float = 12.0, num_heads: int = 60
) -> list[Arrival]:
    """Prompts with prefixes by Zipf's law, at Poisson times. The prefixes do not fit into the
    caches.
    """
    rng = random.Random(seed)
    popular = list(itertools.accumulate(1 / (rank + 1) ** 0.8 for rank in range(num_heads)))
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        (head,) = rng.choices(range(num_heads), cum_weights=popular)
        names = (*_named(-1 - head, 6 + head % 7), *_named(number, rng.randrange(4)))
        num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
        arrivals.append(Arrival(now, num_tokens, 1 + int(rng.expovariate(1 / 60)), names))
    return arrivals


def bursts(seed: int, count: int) -> list[Arrival]:
    """Bursts of 10 to 49 requests in half a second, with silences between them.

    Most requests of a burst share a prefix.
    """
    rng = random.Random(seed)
    arrivals, now, number = [], 0.0, 0
    while number < count:
        now += rng.expovariate(1 / 6.0)
        head = rng.randrange(12)
        for _ in range(rng.randrange(10, 50)):
            number += 1
            shared = _named(-1 - head, 8) if rng.random() < 0.7 else ()
            names = (*shared, *_named(number, 1 + rng.randrange(6)))
            num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
            at_s = now + rng.uniform(0, 0.5)
            arrivals.append(Arrival(at_s, num_tokens, 1 + int(rng.expovariate(1 / 80)), names))
    return sorted(arrivals, key=lambda a: a.at_s)[:count]


def long_tail(seed: int, count: int, rate_per_s: float = 14.0) -> list[Arrival]:
    """Most prompts are short. One in fifty has 30,000 to about 120,000 tokens.

    Three in ten begin with one of eight prefixes.
    """
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        own = rng.randrange(60, 236) if rng.random() < 0.02 else int(rng.expovariate(1 / 2.5))
        shared = _named(-1 - rng.randrange(8), 5) if rng.random() < 0.3 else ()
        names = (*shared, *_named(number, own))
        num_tokens = len(names) * BLOCK + 1 + rng.randrange(BLOCK)
        arrivals.append(Arrival(now, num_tokens, 1 + int(rng.expovariate(1 / 100)), names))
    return arrivals


def agents(
    seed: int, num_sessions: int, num_turns: int = 8, apart_s: float = 2.0, head: int = 12
) -> list[Arrival]:
    """Agents that begin `apart_s` apart, with the same system prompt of `head` blocks.

    Between two turns, a tool runs. Each turn adds the tool's result to the prompt. At this pace,
    some instances are idle at almost every decision. So a policy that only looks at prefixes may
    send all requests to one instance (S108).
    """
    rng = random.Random(seed)
    arrivals = []
    for session in range(num_sessions):
        now, own = session * apart_s * rng.uniform(0.9, 1.1), 1
        for _ in range(num_turns):
            names = (*_named(-1, head), *_named(session, own))
            num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
            num_output = 1 + int(rng.expovariate(1 / 60))
            arrivals.append(
                Arrival(now, num_tokens, num_output, names, "agents", f"agent-{session}")
            )
            now += rng.uniform(4.0, 20.0)
            own += 1 + int(rng.expovariate(1 / 1.5))
    return sorted(arrivals, key=lambda a: a.at_s)


def agents_beside_documents(
    seed: int, num_sessions: int, documents_per_s: float = 2.0
) -> list[Arrival]:
    """Agents beside prompts that never come again.

    An agent's tool takes 4 to 20 s, and in one of five turns a minute or two. Each agent's client
    says when it pauses and when it is done.
    """
    rng = random.Random(seed)
    sessions: dict[str, list[Arrival]] = {}
    for turn in agents(seed, num_sessions, apart_s=1.0, head=4):
        sessions.setdefault(turn.chat_id, []).append(turn)
    arrivals = []
    for turns in sessions.values():
        late = 0.0
        for number, turn in enumerate(turns):
            is_last = number == len(turns) - 1
            state = SessionState.DONE if is_last else SessionState.PAUSED_FOR_TOOL
            arrivals.append(replace(turn, at_s=turn.at_s + late, session_state=state))
            late += rng.uniform(50, 110) if rng.random() < 0.2 else 0.0
    now, last = 0.0, max(a.at_s for a in arrivals)
    while (now := now + rng.expovariate(documents_per_s)) < last:
        names = _named(1_000_000 + len(arrivals), rng.randrange(6, 18))
        num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
        arrivals.append(Arrival(now, num_tokens, 1 + int(rng.expovariate(1 / 60)), names))
    return sorted(arrivals, key=lambda a: a.at_s)


def working_set(seed: int, count: int, rate_per_s: float = 9.0) -> list[Arrival]:
    """Prompts with one of sixty prefixes of 22 blocks, in random order. Each has a short tail of
    its own.
    """
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        names = (*_named(-1 - rng.randrange(60), 22), *_named(number, 1))
        num_tokens = len(names) * BLOCK + rng.randrange(BLOCK)
        arrivals.append(Arrival(now, num_tokens, 1 + int(rng.expovariate(1 / 60)), names))
    return arrivals


def rtp_short_chats(seed: int, count: int, rate_per_s: float = 40.0) -> list[Arrival]:
    """RTP-LLM's first workload (S131). Each prefix has a dozen requests."""
    return short_chats(
        random.Random(seed), num_scenarios=count // 12, num_requests=12, rate_per_s=rate_per_s
    )


def rtp_long_prompts(seed: int, count: int, rate_per_s: float = 16.0) -> list[Arrival]:
    """RTP-LLM's second workload (S131) at a quarter of its lengths."""
    arrivals = long_prompts(
        random.Random(seed), num_scenarios=count // 12, num_requests=12, rate_per_s=rate_per_s
    )
    return scaled(arrivals, lengths=0.25)


def window(arrivals: Sequence[Arrival], seed: int, count: int, time: float = 1.0) -> list[Arrival]:
    """A part of a trace, a different one for each of four seeds. Its times are multiplied by
    `time`.
    """
    most = max(1, (len(arrivals) - count) // 3)
    part = arrivals[(seed - 1) % 4 * most :][:count]
    return list(_from_zero(part, time))


def _from_zero(arrivals: Sequence[Arrival], time: float) -> Iterator[Arrival]:
    first = arrivals[0].at_s
    for a in arrivals:
        at_s = (a.at_s - first) * time
        yield Arrival(at_s, a.num_prompt_tokens, a.num_output_tokens, a.blocks, a.scenario)


def _named(name: int, count: int) -> tuple[bytes, ...]:
    return tuple(block_name(name, part) for part in range(count))
