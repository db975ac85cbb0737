"""The requests to send: when, how long, and which blocks of the prompt they share with others.

Traces and generated load have the same form, which both the simulator and the load generator use.
Two prompts whose first block names are equal share these blocks as a prefix.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from pdmesh.core.kv.tiers.session_holds import SessionState

_TRACE_BLOCK: Final = 512  # tokens per hash id in Mooncake's trace
_TICK_S: Final = 3.0  # arrivals in Mooncake's trace are rounded to so many seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `blocks` has the names of the prompt's full blocks of `block_size` tokens, in
    order.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[bytes, ...] = ()
    scenario: str = "default"
    chat_id: str = ""
    session_state: SessionState | None = None  # what the client says about session `chat_id`


def block_name(*parts: int) -> bytes:
    """A name of 16 bytes, like the mesh's own block hashes, made from a few small numbers."""
    return b"".join(part.to_bytes(16 // len(parts), "little", signed=True) for part in parts)


def trace_file(folder: Path | None, name: str) -> Path:
    """The file of a public trace. If it is missing, the program ends with a message on what to
    do.
    """
    if folder is None or not (folder / name).exists():
        raise SystemExit(
            f"{name} is not {'there' if folder is None else f'in {folder}'}: say with --traces "
            "FOLDER (make: TRACES=FOLDER) where it is;"
            " loadtests/README.md says where to get it"
        )
    return folder / name


def mooncake(path: Path, block_size: int = 64, *, jitter_seed: int | None = None) -> list[Arrival]:
    """The requests of the Mooncake trace.

    Arrivals of the trace come in bursts every 3 s. `jitter_seed` spreads each burst over its 3 s.
    With None, the bursts stay.
    """
    rng = random.Random(jitter_seed)
    arrivals = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            at_s = row["timestamp"] / 1000
            if jitter_seed is not None:
                at_s += rng.uniform(0, _TICK_S)
            arrivals.append(
                Arrival(
                    at_s,
                    row["input_length"],
                    row["output_length"],
                    _split(row["hash_ids"], row["input_length"], block_size),
                )
            )
    return sorted(arrivals, key=lambda a: a.at_s)


def _split(ids: Sequence[int], num_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """Split each traced block into blocks of `block_size`. A partial last block gets no name."""
    per_id = _TRACE_BLOCK // block_size
    names = (block_name(i, part) for i in ids for part in range(per_id))
    return tuple(name for name, _ in zip(names, range(num_tokens // block_size), strict=False))


def azure(path: Path, scenario: str) -> list[Arrival]:
    """The requests of an Azure LLM trace: times and lengths. They share no blocks."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        Arrival(at - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]), (), scenario)
        for at, row in zip(times, rows, strict=True)
    ]


def prefixed_scenarios(
    rng: random.Random,
    *,
    num_scenarios: int,
    num_requests: int,
    prefix_tokens: int,
    num_tokens: int,
    num_output_tokens: int,
    rate_per_s: float,
    block_size: int = 64,
    num_templates: int = 1,
) -> list[Arrival]:
    """`num_requests` of each scenario, in random order.

    Each prompt begins with one of its scenario's templates. No other prompt has the rest.
    """
    order = [s for s in range(num_scenarios) for _ in range(num_requests)]
    rng.shuffle(order)
    arrivals, now = [], 0.0
    for number, scenario in enumerate(order):
        now += rng.expovariate(rate_per_s)
        template = rng.randrange(num_templates)
        shared = [
            block_name(-1 - scenario, template * 4096 + part)
            for part in range(prefix_tokens // block_size)
        ]
        own_blocks = num_tokens // block_size - len(shared)
        own = [block_name(number, part) for part in range(own_blocks)]
        arrivals.append(
            Arrival(now, num_tokens, num_output_tokens, (*shared, *own), f"scenario-{scenario}")
        )
    return arrivals


def short_chats(
    rng: random.Random, *, num_scenarios: int, num_requests: int, rate_per_s: float
) -> list[Arrival]:
    """RTP-LLM's first workload (S131): prompts of 300 to 1,000 tokens, 340 on average, answers of
    7.

    Each prompt has a beginning that it shares, and a tail of its own.
    """
    arrivals = prefixed_scenarios(
        rng,
        num_scenarios=num_scenarios,
        num_requests=num_requests,
        prefix_tokens=192,
        num_tokens=960,
        num_output_tokens=7,
        rate_per_s=rate_per_s,
    )
    return [_cut(a, min(1000, 300 + int(rng.expovariate(1 / 40)))) for a in arrivals]


def _cut(arrival: Arrival, num_tokens: int) -> Arrival:
    return replace(arrival, num_prompt_tokens=num_tokens, blocks=arrival.blocks[: num_tokens // 64])


def long_prompts(
    rng: random.Random, *, num_scenarios: int, num_requests: int, rate_per_s: float
) -> list[Arrival]:
    """RTP-LLM's second workload: prompts of 2,500 tokens, answers of 114.

    A third of each prompt is shared.
    """
    return prefixed_scenarios(
        rng,
        num_scenarios=num_scenarios,
        num_requests=num_requests,
        prefix_tokens=832,
        num_tokens=2500,
        num_output_tokens=114,
        rate_per_s=rate_per_s,
    )


def chats(
    rng: random.Random,
    *,
    num_chats: int,
    num_turns: int,
    first_tokens: int,
    turn_tokens: int,
    num_output_tokens: int,
    rate_per_s: float,
    think_s: float,
    block_size: int = 64,
) -> list[Arrival]:
    """Conversations: each turn's prompt is the prompt before, its answer, and a new question.

    All conversations begin with the same 2 blocks.
    """
    arrivals, start = [], 0.0
    for chat in range(num_chats):
        start += rng.expovariate(rate_per_s)
        now = start
        for turn in range(num_turns):
            num_tokens = first_tokens + turn * (turn_tokens + num_output_tokens)
            names = [
                block_name(-7, part) if part < 2 else block_name(chat, part)
                for part in range(num_tokens // block_size)
            ]
            arrivals.append(
                Arrival(now, num_tokens, num_output_tokens, tuple(names), "chat", f"chat-{chat}")
            )
            now += rng.expovariate(1 / think_s)
    return sorted(arrivals, key=lambda a: a.at_s)


def poisson(arrivals: Iterable[Arrival], rate_per_s: float, rng: random.Random) -> list[Arrival]:
    """The same requests at Poisson times."""
    now, moved = 0.0, []
    for arrival in arrivals:
        now += rng.expovariate(rate_per_s)
        moved.append(replace(arrival, at_s=now))
    return moved


def scaled(
    arrivals: Iterable[Arrival], *, time: float = 1.0, lengths: float = 1.0, block_size: int = 64
) -> list[Arrival]:
    """The same requests, with times and lengths multiplied by a factor.

    The first blocks of a shared prefix stay shared.
    """
    out = []
    for arrival in arrivals:
        num_tokens = max(1, round(arrival.num_prompt_tokens * lengths))
        out.append(
            replace(
                arrival,
                at_s=arrival.at_s * time,
                num_prompt_tokens=num_tokens,
                num_output_tokens=max(1, round(arrival.num_output_tokens * lengths)),
                blocks=_thinned(arrival.blocks, lengths)[: num_tokens // block_size],
            )
        )
    return out


def _thinned(blocks: tuple[bytes, ...], factor: float) -> tuple[bytes, ...]:
    """Keep only a share `factor` of the names. A prefix shared over k blocks is then shared over k
    * factor blocks.
    """
    if factor >= 1.0:
        return blocks
    count = int(len(blocks) * factor)
    return tuple(blocks[int(i / factor)] for i in range(count))
