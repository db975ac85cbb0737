"""Reads a model's vocabulary for llguidance from the model's files, without Hugging Face's library.

llguidance is imported where it is used, so a process that compiles no grammar never loads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def load_vocabulary(model_dir: Path, vocab_size: int) -> LLTokenizer:
    """Load the vocabulary. `vocab_size` is the number of the model's logits.

    A large vocabulary takes a second. Raises OSError or ValueError for unsuitable files.
    """
    text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
    return vocabulary_of(text, vocab_size, _eos(model_dir, json.loads(text)))


def vocabulary_of(tokenizer_json: str, vocab_size: int, eos_token: int) -> LLTokenizer:
    """Raises ValueError."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = json.loads(tokenizer_json)
    tokenizer["truncation"] = tokenizer["padding"] = None
    num_ids = _num_ids(tokenizer)
    size = max(vocab_size, num_ids)
    if not 0 <= eos_token < size:
        raise ValueError("no token ends a text")
    library = LLTokenizer(json.dumps(tokenizer), n_vocab=size, eos_token=eos_token)
    added = tokenizer.get("added_tokens") or ()
    special = {int(token["id"]) for token in added if token.get("special")}
    special |= {eos_token, *range(num_ids, size)}
    words = TokenizerWrapper(_Words(library, size, eos_token, sorted(special)))
    return LLTokenizer(words, n_vocab=size, eos_token=eos_token)


def added_tokens(tokenizer_json: str) -> dict[str, int]:
    """The ids of the tokenizer's added tokens, by text."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    return {str(token["content"]): int(token["id"]) for token in added}


class _Words:
    """The tokens as bytes. An added token is special only if the tokenizer marks it so.

    llguidance by itself treats every added token in angle brackets as special, for example Qwen's
    `<tool_call>`. Where a grammar has this text, llguidance then allows the token in its mask, but
    refuses the token when it is drawn.
    """

    bos_token_id = unk_token_id = None

    def __init__(self, library: LLTokenizer, size: int, eos_token: int, special: list[int]) -> None:
        self._library = library
        self.eos_token_id = eos_token
        self.special_token_ids = special
        self.tokens = [library.decode_bytes([token_id]) for token_id in range(size)]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return self._library.tokenize_bytes(data)


def _eos(model_dir: Path, tokenizer: dict[str, Any]) -> int:
    """The EOS token, chosen as in vLLM. Returns -1 if there is none."""
    named = _read(model_dir / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    for token in tokenizer.get("added_tokens") or ():
        if token["content"] == text:
            return int(token["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        return int(vocabulary[text])
    for name in ("generation_config.json", "config.json"):
        value = _read(model_dir / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if known := [each for each in ids if isinstance(each, int)]:
            return min(known)
    return -1


def _num_ids(tokenizer: dict[str, Any]) -> int:
    added = [int(token["id"]) for token in tokenizer.get("added_tokens") or ()]
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*added, *ids], default=-1)


# The values are Any because the files may hold any JSON. Each caller checks the values it reads.
def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
