"""Decides whether prefills and decodes keep the KV of the same draft (S67).

A draft's KV travels in the same blocks as the model's, so instances with different drafts never
pair. Each of them would compute whole requests alone, and no hand-over would be seen to fail.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from pdmesh.core.speculation.schedule import Method

_METHODS: Final = {method.value: method for method in Method}


@dataclass(frozen=True, slots=True)
class SpeculationText:
    """A role's option `speculation` as JSON text, and the setting that gave it."""

    setting: str
    text: str = ""

    @property
    def draft(self) -> str:
        """Whose KV is kept beside the model's; empty: none's.

        It is also empty for an option that an instance will refuse.
        """
        try:
            option = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return ""
        if not isinstance(option, dict):
            return ""
        method = _METHODS.get(str(option.get("method")))
        if method is None or not method.has_kv:
            return ""
        folder = str(option.get("model") or "")
        return f"{method.value} {PurePosixPath(folder)}" if folder else method.value


def draft_split(prefill: SpeculationText, decode: SpeculationText) -> str:
    """Why these prefills and decodes would never exchange KV, in a line; empty: they would."""
    if prefill.draft == decode.draft:
        return ""
    return (
        f"the draft of prefills is {prefill.draft or 'none'} ({prefill.setting}), and that of "
        f"decodes is {decode.draft or 'none'} ({decode.setting}): they exchange no KV; give both "
        "the same"
    )
