"""Tests models without a tokenizer.json. An instance converts other tokenizer files of the model,
but must not run any code of the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from pdmesh.instance.incarnation.model_text import LoadedText, text_of
from pdmesh.services.gateway.text.chat_template import Conversation
from pdmesh.services.gateway.text.tokenizer import Tokenizer

# Both packages come with vLLM.
mistral_common = pytest.importorskip("mistral_common")
pytest.importorskip("transformers")

from mistral_common.protocol.instruct.messages import (  # noqa: E402
    AssistantMessage,
    SystemMessage,
    UserMessage,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: E402
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

DATA = Path(mistral_common.__file__).parent / "data"
TEXTS = (
    "Hello, world!", "  two spaces, a tab\t and\n\nnewlines  ", "naïve café, größer",
    "日本語と🙂🚀", "def f(x):\n    return x**2 # 3.14159", "1234567890" * 7, "\r\n",
)  # fmt: skip
CONVERSATION = (
    ("system", "Be brief."), ("user", "What is 2+2?"), ("assistant", "4."), ("user", "And 3+3? 🙂"),
)  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(7)
    drawn = [
        "".join(chr(rng.choice((32, 10, rng.randrange(33, 0x250), 0x4E00))) for _ in range(60))
        for _ in range(200)
    ]
    return [*TEXTS, *drawn]


async def loaded(text: LoadedText) -> Tokenizer:
    assert text.files is not None
    return await asyncio.to_thread(Tokenizer.load, text.files.folder, max_chars=100_000)


async def test_a_converted_tekken_file_gives_the_tokens_of_mistrals_library(tmp_path: Path) -> None:
    """Tokens and decoded texts must equal those of mistral_common, which vLLM uses, too."""
    shutil.copyfile(DATA / "tekken_240911.json", tmp_path / "tekken.json")
    own = MistralTokenizer.from_file(str(tmp_path / "tekken.json"))
    inner = own.instruct_tokenizer.tokenizer
    text = await text_of(tmp_path)
    tokenizer = await loaded(text)
    for prompt in texts():
        expected = inner.encode(prompt, bos=True, eos=False)
        assert list(await tokenizer.encode(prompt, add_special_tokens=True)) == expected
        assert tokenizer.text_stream(()).feed(expected[1:]) == inner.decode(expected[1:])
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    messages = [kinds[role](content=content) for role, content in CONVERSATION]
    asked = own.encode_chat_completion(ChatCompletionRequest(messages=messages))
    rendered = tokenizer.render_chat(
        Conversation([{"role": role, "content": content} for role, content in CONVERSATION])
    )
    assert list(await tokenizer.encode(rendered, add_special_tokens=False)) == asked.tokens
    assert tokenizer.eos_token_ids == {inner.eos_id}
    assert text.made is not None
    assert os.path.exists(text.made.name)
    text.remove()
    assert not os.path.exists(text.made.name)


async def test_a_converted_sentencepiece_file_gives_the_tokens_of_plain_vllm(
    tmp_path: Path,
) -> None:
    shutil.copyfile(DATA / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32_000}))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = AutoTokenizer.from_pretrained(str(tmp_path))  # vLLM loads the tokenizer in the same way
    text = await text_of(tmp_path)
    tokenizer = await loaded(text)
    try:
        assert tokenizer.vocab_size == 32_000
        for prompt in texts():
            expected = own.encode(prompt)
            assert list(await tokenizer.encode(prompt, add_special_tokens=True)) == expected
            assert tokenizer.text_stream(()).feed(expected) == own.decode(
                expected, skip_special_tokens=True
            )
    finally:
        text.remove()


@pytest.mark.parametrize("kind", ["code", "broken"])
async def test_no_code_of_a_model_is_run_and_a_broken_file_stops_no_instance(
    tmp_path: Path, kind: str
) -> None:
    evil = tmp_path / "model"
    evil.mkdir()
    config = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    (evil / "tokenizer_config.json").write_text(json.dumps(config))
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {}}))
    (evil / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (evil / ("evil.tiktoken" if kind == "code" else "tekken.json")).write_text("x")
    text = await text_of(evil)
    assert text.files is None
    assert not (tmp_path / "ran").exists()
