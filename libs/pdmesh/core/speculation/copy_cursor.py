"""Prompt lookup with a cursor: an answer that copies a text proposes what comes next in that text
(S116, S117).

Plain prompt lookup searches in each step for an earlier place with the answer's last tokens. A text
with repeated lines has many such places, and most are wrong. The cursor stays where the answer
copies, and advances with each copied token. After an edit, the search prefers places near the one
that the answer left, and a single equal token there is enough. The first proposal begins after the
first place in the prompt that has the answer's first token.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.speculation.ngram_index import NgramIndex, Tokens

WINDOW: Final = 64  # tokens after the place that the answer left, where one equal token is enough
PATIENCE: Final = 32  # tokens that the answer may draw before one equal token is not enough
SURE: Final = 4  # tokens copied in a row that make a place worth returning to
REPLAYED: Final = 64  # the most drawn tokens from which a moved request finds its place again


class CopyCursor:
    """The text of one request, and the place that its answer copies.

    `num_drawn`: how many tokens at the end of `text` are the answer's, wherever they were drawn.
    """

    def __init__(self, text: Tokens, num_drawn: int, max_tokens: int) -> None:
        num_replayed = min(max(0, num_drawn - 1), REPLAYED)
        begin = len(text) - num_replayed
        self._index = NgramIndex(text[:begin], max_tokens)
        self._prompt_end = len(text) - num_drawn
        self._is_first = num_drawn <= REPLAYED
        self._cursor: int | None = None
        self._left: int | None = None  # the place where the answer stopped copying
        self._num_copied = 0  # in a row, up to the end
        self._num_since = 0  # tokens drawn since the answer left its place
        for token in text[begin:]:
            self._seek()
            self.extend([int(token)])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_steps(self) -> int:
        """The work so far."""
        return self._index.num_steps

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def extend(self, tokens: Tokens) -> None:
        """Add the answer's next tokens."""
        for token in tokens:
            self._follow(token)
            self._index.extend([token])
            self._forget(self._index.num_forgotten)

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens; none if the text has no place to copy."""
        if num_tokens <= 0:
            return []
        self._seek()
        if self._cursor is None:
            return []
        proposed = self._index.part(self._cursor, self._cursor + num_tokens).tolist()
        while len(proposed) < num_tokens:  # the answer repeats its own end
            proposed += proposed[: num_tokens - len(proposed)]
        return proposed

    def _follow(self, token: int) -> None:
        """Advance or drop the cursor. The text's end advances with it, so it stays in the text."""
        self._num_since += 1
        if self._cursor is None:
            return
        if self._index.at(self._cursor) == token:
            self._cursor += 1
            self._num_copied += 1
            return
        if self._num_copied >= SURE:
            self._left, self._num_since = self._cursor, 1
        self._cursor, self._num_copied = None, 0

    def _forget(self, oldest: int) -> None:
        """Text before `oldest` is gone."""
        if self._cursor is not None and self._cursor < oldest:
            self._cursor = None
        if self._left is not None and self._left < oldest:
            self._left = None

    def _seek(self) -> None:
        if self._cursor is not None or not len(self._index):
            return
        if self._is_first:
            self._is_first = False
            self._cursor = self._beginning()
        else:
            self._cursor = self._index.next_after(self._left)
        if self._cursor is None and self._left is not None and self._num_since <= PATIENCE:
            last = self._index.at(len(self._index) - 1)
            end = min(self._left + WINDOW, len(self._index) - 1)
            found = self._index.find(last, self._left, end)
            self._cursor = None if found is None else found + 1

    def _beginning(self) -> int:
        """Where the first proposal begins in the prompt.

        It begins after the first token that equals the answer's first token. If there is none, it
        begins at the prompt's beginning.
        """
        if self._prompt_end >= len(self._index):
            return self._index.num_forgotten
        found = self._index.find(self._index.at(self._prompt_end), 0, self._prompt_end)
        return self._index.num_forgotten if found is None else found + 1
