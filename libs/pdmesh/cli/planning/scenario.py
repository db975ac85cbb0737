"""Reads the load and the goals for `pdmesh plan`, from a scenario file and from options.

An option overrides the file's field.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdmesh.cli.planning.trace_file import read_trace
from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.traffic import Goals, Traffic, traffic_of

T = TypeVar("T")

_MAX_BYTES: Final = 1 << 20
# Each field of a scenario file, and the option that overrides it.
OPTIONS: Final = {
    "rate_per_s": "rate", "prompt": "prompt", "answer": "answer", "cached_share": "cached",
    "trace": "trace", "ttft_s": "ttft", "tpot_s": "tpot", "share": "share",
}  # fmt: skip


class ScenarioFile(BaseModel):
    """The fields of a scenario file.

    `prompt` and `answer` are lengths in tokens: a number, MIN-MAX, or mean=N,p99=M.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    rate_per_s: float | None = Field(None, gt=0, lt=1e6)
    prompt: str | None = None
    answer: str | None = None
    cached_share: float = Field(0.0, ge=0, lt=1)
    trace: str | None = None
    ttft_s: float | None = Field(None, gt=0, lt=1e6)
    tpot_s: float | None = Field(None, gt=0, lt=1e6)
    share: float = Field(0.99, gt=0.5, lt=1)


@dataclass(frozen=True, slots=True)
class PlannedScenario:
    traffic: Traffic
    goals: Goals


def read_scenario(options: argparse.Namespace) -> PlannedScenario:
    """Read the scenario. Raises SizingProblem with the field and the option."""
    given: dict[str, Any] = _file(options.scenario) if options.scenario else {}
    for field, option in OPTIONS.items():
        if (value := getattr(options, option)) is not None:
            given[field] = value
    try:
        scenario = ScenarioFile.model_validate(given)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise SizingProblem(".".join(map(str, first["loc"])), str(first["msg"])) from exc
    folder = options.scenario.parent if options.scenario and options.trace is None else Path()
    return PlannedScenario(_traffic(scenario, folder), _goals(scenario))


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
        read = yaml.safe_load(text) if len(text) <= _MAX_BYTES else None
    except OSError as exc:
        raise SizingProblem("scenario", f"cannot read {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, RecursionError) as exc:
        raise SizingProblem("scenario", f"{path} is not YAML: {exc}") from exc
    if not isinstance(read, dict):
        raise SizingProblem("scenario", f"{path} is not a mapping of at most 1 MiB")
    return read


def _traffic(scenario: ScenarioFile, folder: Path) -> Traffic:
    if scenario.trace is not None:
        if scenario.prompt or scenario.answer or scenario.cached_share:
            raise SizingProblem("trace", "a trace has its own lengths and its own cached shares")
        traffic = read_trace(folder / scenario.trace)
        return traffic.at(scenario.rate_per_s) if scenario.rate_per_s else traffic
    rate = _needed(scenario.rate_per_s, "rate_per_s")
    prompt, answer = _needed(scenario.prompt, "prompt"), _needed(scenario.answer, "answer")
    return traffic_of(rate, prompt, answer, scenario.cached_share)


def _goals(scenario: ScenarioFile) -> Goals:
    return Goals(
        _needed(scenario.ttft_s, "ttft_s"), _needed(scenario.tpot_s, "tpot_s"), scenario.share
    )


def _needed(value: T | None, field: str) -> T:
    if value is None:
        raise SizingProblem(field, f"is missing: give it in the scenario or as --{OPTIONS[field]}")
    return value
