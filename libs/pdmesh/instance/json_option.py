"""Reads those options of an instance that are JSON objects, such as arguments for vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from pdmesh.core.instance.engine_args import refusal

_MAX_CHARS: Final = 8192
_MAX_NAME_CHARS: Final = 64


def _from_text(value: object) -> object:
    """Parses an option that came as text, from an assignment or an environment variable."""
    if not isinstance(value, str):
        return value
    try:
        if len(value) > _MAX_CHARS:
            raise ValueError
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None


def _settable(args: dict[str, object]) -> dict[str, object]:
    """Refuses arguments that the mesh sets itself.

    vLLM's own parser checks the values later, once vLLM is imported.
    """
    for name in args:
        if reason := refusal(name):
            raise ValueError(f"{name[:_MAX_NAME_CHARS]}: {reason}")
    return args


FROM_TEXT: Final = BeforeValidator(_from_text)
EngineArgsOption = Annotated[dict[str, object], FROM_TEXT, AfterValidator(_settable)]
