"""Finds the files in a model's folder that gateways need, and computes their digests.

Gateways turn text into tokens and back. For this they need the tokenizer, the chat template, and
the model's default settings. They get no weights and no code. If a folder has a `tokenizer.json`,
its other vocabulary files are not needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 128 << 20  # all files of a model; the largest known model has 40 MB
PIECE_BYTES: Final = 256 << 10
_MAX_FILES: Final = 32
_TOKENIZER: Final = "tokenizer.json"  # the only vocabulary file that gateways can read
# The files that map ids to tokens in folders without a tokenizer.json.
_OTHER_VOCABULARY: Final = re.compile(
    r"tekken\.json|tokenizer\.model(\.v\d+\w*)?|[\w.-]{1,64}\.tiktoken|tiktoken\.model"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
    r"|added_tokens\.json|special_tokens_map\.json"
)
_OF_CHAT: Final = frozenset(
    {
        "tokenizer_config.json", "config.json", "generation_config.json",
        "chat_template.jinja",
    }
)  # fmt: skip
_TEMPLATES: Final = "additional_chat_templates"  # a folder of chat templates
_TEMPLATE: Final = re.compile(rf"{_TEMPLATES}/\w[\w.-]{{0,63}}\.jinja")


class BadTextFiles(Exception):
    """A folder cannot be read, has no tokenizer, or has too many or too large files."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of one model.

    `digest` covers all files. `vocabulary` is a digest of the files that map token ids to tokens.
    """

    folder: Path
    digests: Mapping[str, str]  # SHA-256 by name
    digest: str
    vocabulary: str
    num_bytes: int

    @property
    def is_readable(self) -> bool:
        """Whether gateways can read the vocabulary."""
        return _TOKENIZER in self.digests

    def pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield each file in pieces, as (name, bytes), sorted by name.

        Blocks the thread. Raises OSError.
        """
        for name in sorted(self.digests):
            with (self.folder / name).open("rb") as file:
                yield name, file.read(PIECE_BYTES)
                while data := file.read(PIECE_BYTES):
                    yield name, data


def is_text_file(name: str) -> bool:
    """`name` is the file's path within the model's folder, with slashes."""
    return _is_of_chat(name) or name == _TOKENIZER or bool(_OTHER_VOCABULARY.fullmatch(name))


def _is_of_chat(name: str) -> bool:
    return name in _OF_CHAT or bool(_TEMPLATE.fullmatch(name))


def read_text_files(folder: Path) -> TextFiles:
    """Find the files and hash them. Blocks the thread. Raises BadTextFiles."""
    try:
        paths = (*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja"))
        found = {p.relative_to(folder).as_posix(): p for p in paths}
        names = sorted(n for n, path in found.items() if is_text_file(n) and path.is_file())
        if _TOKENIZER in names:
            names = [n for n in names if not _OTHER_VOCABULARY.fullmatch(n)]
        num_bytes = sum((folder / name).stat().st_size for name in names)
        if len(names) > _MAX_FILES or num_bytes > MAX_BYTES:
            raise BadTextFiles(f"{folder} has {num_bytes:,} bytes in {len(names)} tokenizer files")
        digests = {name: _sha256(folder / name) for name in names}
    except OSError as exc:
        raise BadTextFiles(f"{folder} cannot be read: {exc.strerror or exc}") from exc
    vocabulary = {n: d for n, d in digests.items() if not _is_of_chat(n)}
    if not vocabulary:
        raise BadTextFiles(f"{folder} has no tokenizer")
    return TextFiles(folder, digests, _digest(digests), _digest(vocabulary), num_bytes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{digests[name]} {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
