"""What one section of the check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Finding:
    """`is_right` is None if the section did not run; then `claim` says why."""

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
