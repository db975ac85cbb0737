"""Prompt lookup with a cursor, which proposes tokens for an answer that copies a text (S116, S117).

Prompt lookup proposes the text that follows an earlier place of the same text. Without a cursor,
each step searches for a place with the answer's last tokens. A text with repeated lines has many
such places, and most of them are wrong. The cursor is the place from which the answer copies, and
advances with each copied token. If the answer differs from the copied text, the next search prefers
places near the last one. There, a single equal token is enough. The answer's first proposal begins
after the first token in the prompt that equals the answer's first token.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.speculation.ngram_index import NgramIndex, Tokens

WINDOW: Final = 64  # tokens after the place that the answer left; one equal token is enough there
# A single equal token is enough only for this many tokens after the answer left the place.
PATIENCE: Final = 32
# If at least this many tokens were copied in a row, later searches prefer places near the last one.
SURE: Final = 4
REPLAYED: Final = 64  # at most this many drawn tokens are replayed for a request that moved here


class CopyCursor:
    """The text of one request, and the place from which its answer copies.

    The last `num_drawn` tokens of `text` are the answer's. Another instance may have drawn them.
    """

    def __init__(self, text: Tokens, num_drawn: int, max_tokens: int) -> None:
        num_replayed = min(max(0, num_drawn - 1), REPLAYED)
        begin = len(text) - num_replayed
        self._index = NgramIndex(text[:begin], max_tokens)
        self._prompt_end = len(text) - num_drawn
        self._is_first = num_drawn <= REPLAYED
        self._cursor: int | None = None
        self._left: int | None = None  # the place where the answer stopped copying
        self._num_copied = 0  # tokens copied in a row, up to the end of the text
        self._num_since = 0  # tokens drawn since the answer stopped copying
        for token in text[begin:]:
            self._seek()
            self.extend([int(token)])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_steps(self) -> int:
        """The work so far, as `NgramIndex` counts it."""
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
        """At most `num_tokens` tokens, or none if the text has no place to copy from."""
        if num_tokens <= 0:
            return []
        self._seek()
        if self._cursor is None:
            return []
        proposed = self._index.part(self._cursor, self._cursor + num_tokens).tolist()
        while len(proposed) < num_tokens:  # the proposal reaches the text's end, and repeats itself
            proposed += proposed[: num_tokens - len(proposed)]
        return proposed

    def _follow(self, token: int) -> None:
        """Advance the cursor if the token was copied, else drop the cursor.

        The text grows by one token as well, so the cursor stays inside the text.
        """
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
        """Drop places before `oldest`, which are no longer in the text."""
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

        This is the place after the first token that equals the answer's first token. If there is no
        such token, it is the beginning of the prompt.
        """
        if self._prompt_end >= len(self._index):
            return self._index.num_forgotten
        found = self._index.find(self._index.at(self._prompt_end), 0, self._prompt_end)
        return self._index.num_forgotten if found is None else found + 1
