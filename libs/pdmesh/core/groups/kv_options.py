"""Decides whether the options of prefills and decodes let them exchange KV (S67).

A draft's KV travels in the same blocks as the model's, and some of vLLM's arguments change what is
in a block. Instances that differ in these never pair. Each of them computes whole requests
alone, so no failed hand-over shows the mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from pdmesh.core.instance.engine_args import kv_identity
from pdmesh.core.speculation.proposal_length import Method

_METHODS: Final = {method.value: method for method in Method}


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option of one role as JSON text, and the setting that gave it."""

    setting: str
    text: str = ""


def _draft(option: dict[str, object]) -> str:
    """The draft whose KV is kept beside the model's; empty if there is none."""
    method = _METHODS.get(str(option.get("method")))
    if method is None or not method.has_kv:
        return ""
    folder = str(option.get("model") or "")
    return f"{method.value} {PurePosixPath(folder)}" if folder else method.value


# By option: the name of the part that decides about KV, and the function that reads this part.
_DECIDES_KV: Final[Mapping[str, tuple[str, Callable[[dict[str, object]], str]]]] = {
    "speculation": ("the draft", _draft),
    "engine_args": ("what changes KV in engine_args", kv_identity),
}
KV_OPTIONS: Final = tuple(_DECIDES_KV)


def kv_split(option: str, prefill: OptionText, decode: OptionText) -> str:
    """One line that says why these prefills and decodes exchange no KV; empty if they do."""
    what, decides = _DECIDES_KV[option]
    of_prefill, of_decode = decides(_read(prefill.text)), decides(_read(decode.text))
    if of_prefill == of_decode:
        return ""
    return (
        f"{what} of prefills is {of_prefill or 'none'} ({prefill.setting}), and that of decodes is "
        f"{of_decode or 'none'} ({decode.setting}): they exchange no KV; give both the same"
    )


def _read(text: str) -> dict[str, object]:
    """The option; empty for one that an instance will refuse."""
    try:
        option = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return option if isinstance(option, dict) else {}
