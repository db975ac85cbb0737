"""Writes the simulated engine's model as a Hugging Face folder, so that it loads like any model.

The folder has a byte-level BPE tokenizer with a small vocabulary, and a ChatML template. Any text
can be encoded, and the sim model's tokens decode to words. The folder has no weights, because the
sim engine computes without weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.engine.sim.vocabulary import EOS_ID, SPECIALS

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_sim_model(folder: Path, max_model_len: int = 4096) -> None:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    Existing files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end, start = SPECIALS[EOS_ID], SPECIALS[1]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": start,
            "eos_token": end,
            "pad_token": SPECIALS[0],
            "model_max_length": max_model_len,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(
        folder / "config.json",
        {
            "model_type": "pdmesh-sim",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": max_model_len,
            "eos_token_id": EOS_ID,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": EOS_ID})


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
