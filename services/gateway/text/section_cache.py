"""Caches the tokens of a prompt's sections, so that a chat's next turn encodes only the new text.

A section is a piece of the prompt that has the same tokens alone as within the prompt. The key of a
section is a hash of all text up to the end of the section. The hash also covers the tenant, so a
tenant cannot learn from response times which texts another tenant sent.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

_BYTES_EACH: Final = 256  # the memory of an entry besides its tokens
_DIGEST_SIZE: Final = 16

Encode = Callable[[str], "array[int]"]


class SectionCache:
    """One cache for all tokenizers and encoding threads of a gateway.

    Above `max_bytes`, the least recently used sections are evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = self.num_reused_tokens = self.num_encoded_tokens = self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def encode(self, sections: Sequence[str], owner: bytes, encode: Encode) -> array[int]:
        """The tokens of a text. Cached sections at the beginning of the text are not encoded again.

        `owner` identifies the tokenizer and the tenant. The last section is not cached, because it
        will be longer in the chat's next turn.
        """
        *whole, last = sections
        tokens: array[int] = array("I")
        names = _names(whole, owner)
        num_kept = 0
        for name in names:
            if (kept := self._kept.get(name)) is None:
                break
            tokens.extend(kept)
            num_kept += 1
        num_reused = len(tokens)
        fresh = [encode(section) for section in whole[num_kept:]]
        for encoded in (*fresh, encode(last)):
            tokens.extend(encoded)
        self._used(names, num_kept, fresh)
        with self._lock:
            self.num_reused_tokens += num_reused
            self.num_encoded_tokens += len(tokens) - num_reused
        return tokens

    def _used(self, names: Sequence[bytes], num_kept: int, fresh: Sequence[array[int]]) -> None:
        """Cache the fresh sections, mark all sections as used, and evict the excess.

        The last sections of a text are evicted first, because a cached section is useful only if
        all sections before it are cached.
        """
        with self._lock:
            for name, encoded in zip(names[num_kept:], fresh, strict=True):
                if name not in self._kept:
                    self._kept[name] = encoded
                    self.num_bytes += _size(encoded)
            for name in reversed(names):
                if name in self._kept:
                    self._kept.move_to_end(name)
            while self.num_bytes > self._max_bytes:
                _, gone = self._kept.popitem(last=False)
                self.num_bytes -= _size(gone)
                self.num_evicted += 1


def _names(sections: Sequence[str], owner: bytes) -> list[bytes]:
    found, before = [], hashlib.blake2b(owner, digest_size=_DIGEST_SIZE).digest()
    for section in sections:
        hashed = hashlib.blake2b(before, digest_size=_DIGEST_SIZE)
        hashed.update(section.encode("utf-8", "surrogatepass"))
        before = hashed.digest()
        found.append(before)
    return found


def _size(tokens: array[int]) -> int:
    return tokens.itemsize * len(tokens) + _BYTES_EACH
