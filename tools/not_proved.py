"""Requirements that no test in this repository proves completely, each with the reason.

The reason is one of these: a measurement proves the requirement, it is the engine's own work, or it
is not implemented or not met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

_NEEDS_GPUS: Final = "not reproduced: it needs GPUs and a model of that size"

# Keys are a number, or the first and the last number of a range.
REASONS: Final[Mapping[str, str]] = {
    "S50": (
        "how little the operators disturb a decode's steps, which needs a GPU; the operators are "
        "only compiled for one, and interpreted"
    ),
    "S52": (
        "not met as written (`make bench NAME=retrieval`, ADR 6): beside pulls, nine in ten tokens "
        "came within 1.12 times the time that they took without pulls, where 1.05 is required (the "
        "median: 1.01); concurrent pulls end 1.2 to 1.5 times as late on average as serial ones"
    ),
    "S56": (
        "not implemented: a pair of ranks has one connection, so a switch may hash several ranks "
        "onto one path (2.6 times as long on average for 8 ranks on 8 paths, never for one rank). "
        "UCX cannot choose ports by a fabric's hash; on RDMA its own settings split a transfer "
        "(ADR 6)"
    ),
    "S63": (
        "the paper's factor of 6.7: ours is 1.3 to 1.9; `make bench NAME=ratio` states the latency "
        "laws, lengths and SLOs"
    ),
    "S64": (
        "measured: `make bench NAME=day`, `make bench NAME=simulate-day` and `make bench "
        "NAME=recovery` draw and describe the day from the mesh's events"
    ),
    "S66": (
        "measured: `make bench NAME=ratio` (decisions with 10,000 instances), `make bench "
        "NAME=plan` and `make bench NAME=staleness` (1,000 instances)"
    ),
    "S82": (
        "p99 of 1.2 is shown beside the same prompts at another pair, since two processes share "
        "the cores; relative to streams alone it is 1.46 on two cores (`make bench "
        "NAME=long-prompts`). F1 to F42 and S24 prove failures and upgrades, S44 and S83 priorities"
    ),
    "S83": (
        "in part: the waiting room is ordered by priority, tenant and deadline (S44), engines "
        "serve by priority and arrival, and whole instances change their role with the load "
        "(S28). The memory of one engine is not shared out anew: vLLM fixes the size of its KV "
        "cache at the start, and a prefill and a decode are two processes. Within a fusion "
        "instance, prompts and answers share one cache without a fixed fraction"
    ),
    "S86": (
        "the time that one buffer saves is measured (`make bench NAME=loading`), of host memory; "
        "memory is not pinned for a GPU, which is most of the paper's 0.6 s"
    ),
    "S87": (
        "that reading and copying overlap is tested, and by how much that shortens loading is "
        "measured (`make bench NAME=loading`), with a device that is emulated"
    ),
    "S103": (
        "dropped (ADR 0042): only whole blocks have names. vLLM shares no block of which it has "
        "computed only a part"
    ),
    "S104": (
        "in part: whole blocks are shared and counted. A block that is not full belongs to one "
        "request, which appends to it, and nothing of it is reused later (ADR 0042)"
    ),
    "S122": (
        "in part: passed on to vLLM (`engine_args: {enable_expert_parallel: true}`), and not "
        "tried on GPUs. On a CPU it is refused, because vLLM itself fails with it there"
    ),
    "S124": (
        "passed on to vLLM (`engine_args: {quantization: fp8}`), and not tried: it needs a GPU"
    ),
    "S129": (
        "in part: images come in parts of messages, and the model's template writes their tags; "
        "`<img>` in a text is a text. Qwen2-VL is run with the code of transformers; vLLM's own "
        "needs torchvision, whose builds do not run with a CPU's torch"
    ),
    "S130": (
        "in part: an encoder that leaves the language model out needs torchvision, whose builds do "
        "not run with a CPU's torch; there it loads all of the model. What it gains in throughput "
        "and memory needs a GPU"
    ),
    "S132": (
        "the part that needs no GPU, more hits through routing, is S131; the rest is not reproduced"
    ),
    "S133": _NEEDS_GPUS,
    "S134": "its shapes can be asked for by name; its numbers need GPUs and a model of that size",
    "S135": (
        "measured on an emulated slow disk with 2 and 4 ranks (`make bench NAME=loading`); the "
        "paper's seconds need GPUs and its storage"
    ),
    "S136-S137": _NEEDS_GPUS,
    "S140": (
        "the share of steps in time is measured (`make bench NAME=steps`): 98 % on a CPU; on a GPU "
        "only the launch of a step is timed"
    ),
    "S143-S144": (
        "vLLM does this: its engine hands outputs to a thread, and texts are made at the gateway; "
        "the mesh sees the outputs of a step, in order"
    ),
    "S145": (
        "the setting is `ASYNC_SCHEDULING`, and its default `auto`: on for decodes and fusion on a "
        "GPU, as vLLM has it there, and off on a CPU, where vLLM switches it off"
    ),
    "S146-S147": (
        "not met on a CPU (`make bench NAME=steps`): the gap is 0.4 to 0.7 of the synchronous one, "
        "where 0.25 is required; it is 1 % of a step either way, so throughput does not grow. Its "
        "gain on a GPU is not shown"
    ),
    "S149": (
        "not by the length of an answer: vLLM computes nothing after `max_tokens`, so a short one "
        "costs nothing; a prefill can be told to (`on`)"
    ),
    "S150": "for every request of a model that reads images, also for those without any",
}  # fmt: skip


def by_number(reasons: Mapping[str, str]) -> dict[str, str]:
    return {number: why for key, why in reasons.items() for number in numbers(key)}


def numbers(key: str) -> Iterator[str]:
    first, _, last = key.partition("-")
    for number in range(int(first[1:]), int((last or first)[1:]) + 1):
        yield f"{first[0]}{number}"
