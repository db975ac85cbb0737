"""The result of one section of the GPU check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Finding:
    """A section's result. `is_right` is None if the section did not run; `claim` then says why."""

    section: str
    claim: str
    is_right: bool | None
    rows: Sequence[Row] = ()

    def page(self) -> str:
        """One section of the record, as Markdown."""
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "not run"}[self.is_right]
        lines = [f"## {self.section}: {verdict}", "", self.claim, ""]
        if self.rows:
            heads = list(self.rows[0])
            lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
            lines += [f"| {' | '.join(str(row[h]) for h in heads)} |" for row in self.rows]
            lines.append("")
        return "\n".join(lines)
