"""Requirements that no test of this repository proves, or not all of it, each with the reason: what
a record measures instead, what the engine does without us, and what is not there or not met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

_OVERLAP: Final = (
    "vLLM does it: `async_scheduling` is left at its default, which is on, and off for a decode "
    "that proposes tokens "
    "(S118); the mesh sees a step's outputs alone"
)
_LOADING: Final = (
    "not there: vLLM loads the weights, each rank its own; artefacts (S17, S20) are checked and "
    "copied before"
)
_NEEDS_GPUS: Final = "not reproduced: it needs GPUs and a model of that size"
_TEXT_ONLY: Final = (
    "not there: the mesh serves text; a part of a message that is not text is a 400 with its path"
)

# One number, or the first and the last of several.
REASONS: Final[Mapping[str, str]] = {
    "S50": (
        "how little the operators disturb a decode's steps: that needs a GPU; here they are "
        "compiled for one and interpreted"
    ),
    "S52": (
        "not met as written (`make bench NAME=retrieval`, ADR 6): beside pulls nine in ten tokens "
        "came within 1.13 times what they took alone, where 1.05 is asked (the median: 1.01); "
        "pulls at once end 1.2 to 1.5 times as late on average as one by one"
    ),
    "S56": (
        "not there: it needs RDMA over several switches; UCX's own settings say how many paths it "
        "takes"
    ),
    "S63": (
        "the paper's factor of 6.7: ours is 1.3 to 1.9, with its laws, lengths and SLOs in "
        "`make bench NAME=ratio`"
    ),
    "S64": (
        "measured: `make bench NAME=day`, `make bench NAME=simulate-day` and `make bench "
        "NAME=recovery` draw and write it from the mesh's events"
    ),
    "S66": (
        "measured: `make bench NAME=ratio` (decisions with 10,000 instances), `make bench "
        "NAME=plan` and `make bench NAME=staleness` (1,000)"
    ),
    "S67": (
        "not there: what a decode proposes is looked up in the prompt (S118), so there is no "
        "draft model and no state of one to hand over"
    ),
    "S75": (
        "not there: an instance is one data-parallel rank; its host admits, counts and reports "
        "(S40, S92)"
    ),
    "S82": (
        "in parts: failures and upgrades are F1 to F42 and S24, priorities S44; what a prompt "
        "costs decodes beside it is measured by `make bench NAME=retrieval`"
    ),
    "S83": (
        "in parts: the queue is ordered by priority, tenant and deadline (S44); no memory moves "
        "between the roles of an instance, whole instances change role (S28)"
    ),
    "S84-S87": _LOADING,
    "S88": (
        "in parts: a folder as from Hugging Face is loaded as it is (`pdmesh up --model`); slow "
        "storage was not tried"
    ),
    "S109-S115": "vLLM's part: of its proposers prompt lookup alone is used (S118)",
    "S116": (
        "in parts: vLLM's prompt lookup is used and changes no output (S118); steps saved on a "
        "copy task are not measured"
    ),
    "S117": "not there: vLLM looks the prompt up anew at each step",
    "S120-S122": (
        "not there: instances have tensor-parallel ranks only; pipeline, data and expert "
        "parallelism are not passed on to vLLM"
    ),
    "S123-S124": (
        "vLLM reads it from the model's own config, and no setting is needed; not tried, as it "
        "needs a GPU"
    ),
    "S128-S130": _TEXT_ONLY,
    "S132": "the part that needs no GPU, more hits by routing, is S131; the rest is not reproduced",
    "S133-S134": _NEEDS_GPUS,
    "S135": _LOADING,
    "S136-S137": _NEEDS_GPUS,
    "S139-S149": _OVERLAP,
    "S150": _TEXT_ONLY,
}  # fmt: skip


def by_number(reasons: Mapping[str, str]) -> dict[str, str]:
    return {number: why for key, why in reasons.items() for number in numbers(key)}


def numbers(key: str) -> Iterator[str]:
    first, _, last = key.partition("-")
    for number in range(int(first[1:]), int((last or first)[1:]) + 1):
        yield f"{first[0]}{number}"
