"""Shows metrics also under vLLM's names, for dashboards that were made for vLLM.

A metric has an alias only if vLLM's metric means the same. docs/observe.md lists the aliases. The
metrics of requests come from gateways, which count each request once. The metrics of an engine come
from its instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_MODEL: Final = MappingProxyType({"gen_ai_request_model": "model_name"})


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric under vLLM's name.

    `name` is vLLM's name, without the suffixes of series. `family` is our metric's name on a page
    of /metrics. `labels` maps each label that is kept to vLLM's name for it. Values are summed over
    all other labels. If `where` is given, only samples with these labels are summed. An empty value
    in `where` means that a sample must not have the label. If `is_of_engine`, the samples get a
    label with the model that this instance serves.
    """

    name: str
    family: str
    help: str
    labels: Mapping[str, str] = field(default_factory=lambda: _MODEL)
    where: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    is_of_engine: bool = False


ALIASES: Final = (
    Alias(
        "vllm:num_requests_running",
        "pdmesh_slots_used",
        "Requests in the instance's slots",
        _NOTHING,
        is_of_engine=True,
    ),
    Alias(
        "vllm:kv_cache_usage_perc",
        "pdmesh_kv_engine_usage",
        "Share of the KV blocks that sequences hold",
        _NOTHING,
        is_of_engine=True,
    ),
    Alias(
        "vllm:num_requests_waiting",
        "pdmesh_gateway_waiting",
        "Requests in the gateway's waiting room, of all models",
        _NOTHING,
    ),
    Alias(
        "vllm:prompt_tokens",
        "pdmesh_gateway_tokens",
        "Tokens of prompts",
        where={"direction": "input"},
    ),
    Alias(
        "vllm:generation_tokens",
        "pdmesh_gateway_tokens",
        "Tokens of answers",
        where={"direction": "output"},
    ),
    Alias(
        "vllm:prefix_cache_queries",
        "pdmesh_gateway_tokens",
        "Tokens of prompts, which were looked up in a cache",
        where={"direction": "input"},
    ),
    Alias(
        "vllm:prefix_cache_hits",
        "pdmesh_gateway_tokens_cached",
        "Tokens of prompts that were found in a cache",
    ),
    Alias(
        "vllm:request_success",
        "pdmesh_requests",
        "Requests that were answered",
        {**_MODEL, "pdmesh_reason": "finished_reason"},
        {"pdmesh_outcome": "completed"},
    ),
    Alias(
        "vllm:time_to_first_token_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "From acceptance to the first token",
    ),
    Alias(
        "vllm:request_time_per_output_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "Mean time between output tokens of a request",
    ),
    Alias(
        "vllm:e2e_request_latency_seconds",
        "gen_ai_server_request_duration_seconds",
        "From acceptance to the last token, of requests that were answered",
        where={"error_type": ""},
    ),
)


class _Served:
    """The model that this instance serves. It is kept here because the gauges do not name it."""

    model = ""


def serve(model: str) -> None:
    """From now on, label the aliases of the engine's metrics with this model."""
    _Served.model = model


class WithVllmNames(Collector):
    """The metrics of a page, and their aliases."""

    def __init__(self, page: Collector) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        families = list(self._page.collect())
        yield from families
        by_name = {family.name: family for family in families}
        for alias in ALIASES:
            family = by_name.get(alias.family)
            if family is not None and (found := _aliased(alias, family)).samples:
                yield found


def _aliased(alias: Alias, family: Metric) -> Metric:
    own = {"model_name": _Served.model} if alias.is_of_engine and _Served.model else {}
    kept = {**alias.labels, "le": "le"}
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        if any(sample.labels.get(name, "") != value for name, value in alias.where.items()):
            continue
        labels = own | {kept[n]: value for n, value in sample.labels.items() if n in kept}
        series = (alias.name + sample.name.removeprefix(family.name), tuple(labels.items()))
        sums[series] = sums.get(series, 0.0) + sample.value
    made = Metric(alias.name, alias.help, family.type)
    for (name, items), value in sums.items():
        made.add_sample(name, dict(items), value)
    return made
