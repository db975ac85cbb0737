"""Reads the defaults for requests from a model's `generation_config.json`.

vLLM reads the same keys of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values for fields that a request leaves out.

    If `max_tokens` is None, the gateway's default applies.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @property
    def shapes_logits(self) -> bool:
        """Whether the defaults alone change the logits or exclude tokens before one is drawn."""
        return (self.top_k, self.min_p, self.repetition_penalty) != (0, 0.0, 1.0)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Read `config`, which may contain anything, and ignore bad values."""
        max_tokens = int(_number(config, "max_new_tokens", 1, math.inf, 0))
        return cls(
            _number(config, "temperature", 0, 2, 1.0),
            _number(config, "top_p", 1e-6, 1, 1.0),
            int(_number(config, "top_k", 0, 1 << 30, 0)),
            _number(config, "min_p", 0, 1, 0.0),
            _number(config, "repetition_penalty", 1e-6, 100, 1.0),
            max_tokens or None,
        )


NO_DEFAULTS: Final = GenerationDefaults()


def _number(
    config: Mapping[str, Any], key: str, low: float, high: float, otherwise: float
) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return otherwise
    return value if low <= value <= high and math.isfinite(value) else otherwise
