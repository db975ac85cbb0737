"""Reads a measured law of an engine's step times, for `pdmesh plan`.

A law is a formula for the time of a step, depending on the step's batch. Without a law, the plan
estimates step times from the GPU's roofline.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.suggestion import suggestion
from pdmesh.engine.step_time_laws import LAWS


def read_law(text: str) -> Law:
    """Find a law by name, or read its coefficients from a YAML file. Raises SizingProblem."""
    if text in LAWS:
        return LAWS[text]
    path = Path(text)
    if not path.is_file():
        known = ", ".join(sorted(LAWS))
        raise SizingProblem("law", f"{text} is neither a file nor a known law; known laws: {known}")
    try:
        read = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, RecursionError) as exc:
        raise SizingProblem("law", f"cannot read {path}: {exc}") from exc
    if not isinstance(read, dict):
        raise SizingProblem("law", f"{path} is not a mapping of coefficients")
    law = Law(**{"name": path.stem, **{name: _value(name, v) for name, v in read.items()}})
    if law.step_s(1, 1) <= 0:
        raise SizingProblem("law", f"{path}: a decode step takes no time: give step_fixed_s")
    return law


def _value(name: str, value: Any) -> Any:
    kinds = {each.name: type(each.default) for each in fields(Law) if each.name != "name"}
    if name not in kinds:
        raise SizingProblem("law", f"{name} is no coefficient{suggestion(str(name), kinds)}")
    if kinds[name] is bool:
        if not isinstance(value, bool):
            raise SizingProblem("law", f"{name}: must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise SizingProblem("law", f"{name}: must be a number of seconds, not {value!r}")
    return float(value)
