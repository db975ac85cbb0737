"""Writes a model directory for tests, with byte-level tokens and a chat template.

The directory has no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 256
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


_NUM_LETTERS = 90


def write_tiny_model(
    directory: Path, template: str = "", model_type: str = "", *, shift: int = 0
) -> Path:
    """Write the files, and return the directory.

    The id of a byte is its place in the byte-level alphabet, and 256 is the end of sequence. If the
    template has reasoning, the tokens 257 and 258 are its marks. Each `shift` makes a different
    model, in which the ids of letters mean other letters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = alphabet[:_NUM_LETTERS]
    alphabet[:_NUM_LETTERS] = letters[shift:] + letters[:shift]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    if "</think>" in template:
        tokenizer.add_tokens(["<think>", "</think>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    source = f"[{shift}]" * bool(shift) + (template or _TEMPLATE)
    (directory / "chat_template.jinja").write_text(source)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    config = {"vocab_size": tokenizer.get_vocab_size(), "model_type": model_type}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
