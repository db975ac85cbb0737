"""Cuts a prompt into sections that have the same tokens alone as within the prompt.

A tokenizer first looks for its added tokens, for example `<|im_start|>`, and encodes the text
between two added tokens separately. So a text may be cut before an added token, if the tokenizer
finds this token whatever text surrounds it. Three kinds of tokens are excluded: those whose names
another added token contains or overlaps, those that depend on the text beside them, and those that
absorb white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """`pattern` matches all marks, which are the names of tokens before which a text may be cut."""

    pattern: re.Pattern[str]
    least_chars: int  # the least length of a section, except the last

    @classmethod
    def of(
        cls, added: Iterable[AddedToken], template: str, least_chars: int
    ) -> SectionMarks | None:
        """The usable marks among the tokens that the chat template contains, or None."""
        tokens = list(added)
        names = {token.content for token in tokens}
        named = [t.content for t in tokens if t.content in template and _is_alone(t)]
        ends = {name[at:] for name in names for at in range(1, len(name))}
        beginnings = {name[:at] for name in names for at in range(1, len(name))}
        safe = [
            name
            for name in sorted(named)
            if not any(name in other and name != other for other in names)
            and ends.isdisjoint(name[:at] for at in range(1, len(name)))
            and beginnings.isdisjoint(name[at:] for at in range(1, len(name)))
        ]
        return cls(re.compile("|".join(map(re.escape, safe))), least_chars) if safe else None

    def sections(self, text: str) -> list[str]:
        """Cut the text into sections. Each section except the first begins with a mark.

        Only the text before a mark and the mark itself decide whether the text is cut there. So if
        a text is continued, only its last section changes. The last section may have any length.
        """
        begin, found = 0, []
        least = max(1, self.least_chars)
        while (mark := self.pattern.search(text, begin + least)) is not None:
            found.append(text[begin : mark.start()])
            begin = mark.start()
        found.append(text[begin:])
        return found


def _is_alone(token: AddedToken) -> bool:
    """Whether the tokenizer finds the token by its name alone, in text before normalization."""
    name = token.content
    depends = token.lstrip or token.rstrip or token.single_word or token.normalized
    return bool(name) and not depends and name == name.strip()
