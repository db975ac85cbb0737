"""Turns text into token ids and back, from a Hugging Face model directory.

Short text is encoded on the event loop, since passing it to a thread costs more than the work.
Longer text is encoded on threads, in batches (`encoding_threads`). The tokens of a chat's earlier
turns are reused (`section_cache`). `text_stream` turns tokens into text as they arrive.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer as HfTokenizer

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.errors import MeshError
from pdmesh.services.gateway.text.bulk_texts import BulkTexts
from pdmesh.services.gateway.text.chat_template import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplates,
    Conversation,
)
from pdmesh.services.gateway.text.encoding_threads import EncodingJob, EncodingQueues
from pdmesh.services.gateway.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from pdmesh.services.gateway.text.section_cache import SectionCache
from pdmesh.services.gateway.text.section_marks import SectionMarks
from pdmesh.services.gateway.text.text_stream import PLAIN, Detokenizer, TextRules, TextStream

_INLINE_CHARS: Final = 2048
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


class BadModelDir(MeshError):
    """The model directory has no usable tokenizer, chat template or configuration."""

    default_reason = "BAD_MODEL_DIR"


@dataclass(frozen=True, slots=True)
class AnswerMarks:
    """The parts of a model's files that show how it writes reasoning and tool calls.

    The keys of `special_tokens` are the names in these files, for example `eos_token`.
    """

    model_type: str = ""
    template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts from a model's files besides the tokenizer and the chat template.

    Token ids are below `vocab_size`. `eos_token_ids` end an answer, unless the client asks to
    ignore them. `vocabulary` is a digest of the assignment of ids to tokens, or empty if it is
    unknown. `packed` is the compressed tokenizer.json, which needs little memory compared with the
    tokenizer.
    """

    eos_token_ids: frozenset[int]
    vocab_size: int
    defaults: GenerationDefaults = NO_DEFAULTS
    vocabulary: str = ""
    eos_token_id: int | None = None  # the tokenizer's end token, which is in `eos_token_ids`
    marks: AnswerMarks = field(default_factory=AnswerMarks)
    packed: bytes = b""


class Tokenizer:
    """A model's tokenizer, with its chat templates and facts.

    A tokenizer has no reference cycle, so it is freed as soon as the last call that uses it ends.
    """

    def __init__(
        self,
        inner: HfTokenizer,
        template: ChatTemplates | None,
        facts: ModelFacts,
        queues: EncodingQueues | None = None,
        sections: SectionCache | None = None,
    ) -> None:
        self.defaults = facts.defaults
        self.eos_token_ids = facts.eos_token_ids
        self.vocab_size = facts.vocab_size
        self.vocabulary = facts.vocabulary
        self.eos_token_id = facts.eos_token_id
        self._inner = inner
        self._decoder = Detokenizer(inner)
        self._template = template
        self.marks = facts.marks
        self._packed = facts.packed
        self.max_token_chars = max(map(len, inner.get_vocab()), default=1)
        self._queues = queues or EncodingQueues(1)
        self._sections, self._key = sections, os.urandom(16)
        self._section_marks = SectionMarks.of(
            inner.get_added_tokens_decoder().values(),
            "".join((facts.marks.template, *facts.marks.special_tokens.values())),
            _INLINE_CHARS,
        )
        self.bulk = BulkTexts(inner, self._queues, self.max_token_chars)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        max_chars: int,
        queues: EncodingQueues | None = None,
        sections: SectionCache | None = None,
        has_defaults: bool = True,
        vocabulary: str = "",
    ) -> Tokenizer:
        """Load a model directory. Raises BadModelDir with a cause that an operator can act on."""
        try:
            text = (model_dir / "tokenizer.json").read_bytes()
            inner = HfTokenizer.from_buffer(text)
        except Exception as exc:  # the library raises bare Exception
            raise BadModelDir(f"no usable tokenizer.json in {model_dir}: {exc}") from exc
        inner.no_truncation()
        inner.no_padding()
        config = _read_json(model_dir / "tokenizer_config.json")
        model_config = _read_json(model_dir / "config.json")
        special = {n: t for n in _SPECIAL_NAMES if (t := _token_text(config.get(n)))}
        sources = _template_sources(model_dir, config)
        try:
            template = ChatTemplates.of(sources, special, max_chars) if sources else None
        except jinja2.TemplateError as exc:
            raise BadModelDir(f"the chat template of {model_dir} cannot be read: {exc}") from exc
        generation = _read_json(model_dir / "generation_config.json")
        eos = _eos_ids(generation, model_config)
        if (token_id := inner.token_to_id(special.get("eos_token", ""))) is not None:
            eos |= {token_id}
        vocab_size = _vocab_size(model_config) or inner.get_vocab_size()
        defaults = GenerationDefaults.of(generation) if has_defaults else NO_DEFAULTS
        marks = AnswerMarks(
            str(model_config.get("model_type") or ""),
            sources.get(WITH_TOOLS) or sources.get(DEFAULT, ""),
            special,
        )
        packed = zlib.compress(text, 1)  # releases the interpreter's lock
        facts = ModelFacts(eos, vocab_size, defaults, vocabulary, token_id, marks, packed)
        return cls(inner, template, facts, queues, sections)

    def to_json(self) -> str:
        """The content of tokenizer.json, which may have many megabytes.

        The text is unpacked from `packed`. The library's `to_str` would hold the interpreter's lock
        for a tenth of a second per megabyte. The event loop would stop for this time, even if
        another thread called `to_str`.
        """
        return zlib.decompress(self._packed).decode() if self._packed else self._inner.to_str()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, conversation: Conversation) -> str:
        """Raises InvalidRequest."""
        assert self._template is not None
        return self._template.render(conversation)

    @property
    def takes_later_system(self) -> bool:
        """Whether the templates accept a system message after the first message."""
        return self._template is not None and self._template.takes_later_system

    async def encode(
        self, text: str, *, add_special_tokens: bool, owner: str | None = None
    ) -> array[int]:
        """The tokens of a text.

        With `owner`, the tenant of a chat, the tokens may be cached for the chat's next turn.
        Raises Overloaded if too much text waits to be encoded.
        """
        job = EncodingJob(text, add_special_tokens, owner)
        if len(text) <= _INLINE_CHARS:
            return self._encode_job(job)
        return await self._queues.encode(self._encode_all, job)

    def _encode_all(self, jobs: Sequence[EncodingJob]) -> list[array[int]]:
        """Encode jobs that have the same `add_special_tokens`."""
        if any(self._has_sections(job) for job in jobs):
            return [self._encode_job(job) for job in jobs]
        return self._encode_texts([job.text for job in jobs], jobs[0].add_special_tokens)

    def _encode_job(self, job: EncodingJob) -> array[int]:
        if not self._has_sections(job):
            return self._encode(job.text, job.add_special_tokens)
        assert self._sections is not None
        assert self._section_marks is not None
        assert job.owner is not None
        return self._sections.encode(
            self._section_marks.sections(job.text),
            self._key + job.owner.encode(),
            self._encode,
        )

    def _has_sections(self, job: EncodingJob) -> bool:
        """Whether the text is a chat that can be cut into sections and is long enough to cache."""
        is_chat = job.owner is not None and not job.add_special_tokens
        is_kept = self._sections is not None and self._section_marks is not None
        return is_chat and is_kept and len(job.text) > _INLINE_CHARS

    def _encode(self, text: str, add_special_tokens: bool = False) -> array[int]:
        return self._encode_texts([text], add_special_tokens)[0]

    def _encode_texts(self, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
        """Encode texts as a batch, even a single text.

        For a batch, the library can skip the offsets of the tokens, which are a quarter of its
        work.
        """
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [token_array(encoding.ids) for encoding in found]

    async def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token in the spelling of the vocabulary, which may differ from its text."""
        if len(token_ids) <= _INLINE_CHARS:
            return self._strings(token_ids)
        return await asyncio.to_thread(self._strings, token_ids)

    def _strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._inner.id_to_token(token_id) or "" for token_id in token_ids]

    async def encode_words(self, words: Sequence[str]) -> list[array[int]]:
        """Encode each word by itself, without special tokens."""
        if sum(map(len, words)) <= _INLINE_CHARS:
            return self._encode_texts(words, False)
        return await asyncio.to_thread(self._encode_texts, words, False)

    def text_stream(self, prompt_ids: Sequence[int], rules: TextRules = PLAIN) -> TextStream:
        """Begin the text of an answer to `prompt_ids`."""
        decoder = self._showing_decoder if rules.are_special_shown else self._decoder
        return TextStream(decoder, prompt_ids, rules)

    @cached_property
    def _showing_decoder(self) -> Detokenizer:
        return Detokenizer(self._inner, are_special_shown=True)

    async def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """The whole text of a prompt, including special tokens."""
        if len(token_ids) <= _INLINE_CHARS:
            return self._showing_decoder.decode(list(token_ids))
        return await asyncio.to_thread(self._showing_decoder.decode, list(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token, special or not. The bytes need not form whole characters."""
        return self._decoder.own_bytes(token_id)

    def shown_bytes(self, token_id: int, *, is_first_of_text: bool) -> bytes:
        """The bytes that a normal (not special) token adds to a text.

        Many decoders remove the space before the first token of a text.
        """
        own = self._decoder.own_bytes(token_id)
        if is_first_of_text and own[:1] == b" ":
            return own if self._decoder.decode([token_id])[:1] == " " else own[1:]
        return own

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Whether at least one of the tokens is not special."""
        special_ids = self._decoder.special_ids
        return any(token_id not in special_ids for token_id in token_ids)


# The values are Any because these files may contain anything. Each use checks the value's type.
def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise BadModelDir(f"{path} is not JSON") from exc
    return content if isinstance(content, dict) else {}


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template_sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The template sources by name. Most models have only the default template."""
    found: dict[str, str] = {}
    source = config.get("chat_template")
    if isinstance(source, list):
        found = {t.get("name", ""): t.get("template") or "" for t in source if isinstance(t, dict)}
    elif isinstance(source, str):
        found = {DEFAULT: source}
    paths = {path.stem: path for path in (model_dir / "additional_chat_templates").glob("*.jinja")}
    if (path := model_dir / "chat_template.jinja").exists():
        paths[DEFAULT] = path
    found |= {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return found if found.get(DEFAULT) else {}


def _vocab_size(config: Mapping[str, Any]) -> int:
    """The vocabulary size from a model's config, or 0 if the config does not give it.

    The configs of models that read images may give the size in `text_config`.
    """
    text_config = config.get("text_config")
    value = config.get("vocab_size")
    if value is None and isinstance(text_config, dict):
        value = text_config.get("vocab_size")
    return value if isinstance(value, int) and value > 0 else 0


def _eos_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The end tokens of the first config that names any.

    The caller passes generation_config first, because config often lacks the token that ends a
    chat. The caller also adds the tokenizer's end token, which neither config needs to name.
    """
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int))
        if found:
            return found
    return frozenset()
