"""A text is cut into sections only where each section has the same tokens alone as in the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from pdmesh.services.gateway.text.section_marks import SectionMarks

START, END, WIDE, WORD = "<|start|>", "<|end|>", "<wide>", "word"
# Some are beginnings of marks, white space, or characters of several bytes.
PIECES = [START, END, WIDE, WORD, "<|", "|>", "start", " ", "\n", "a", "b", "ab", "é", "日本", "  "]
ALPHABET = "".join(sorted(set("".join(PIECES)))) + "▁xyz"
texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
least = st.integers(0, 12)


def built(
    added: list[AddedToken], *, normalizer: Any = None, pre_tokenizer: Any = None
) -> Tokenizer:
    vocabulary = {char: index for index, char in enumerate(ALPHABET)}
    merges = [("a", "b"), (" ", " "), ("s", "t")]
    vocabulary |= {a + b: len(vocabulary) + n for n, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(added)
    return tokenizer


def mark(name: str, **rules: bool) -> AddedToken:
    return AddedToken(name, **{"special": True, "normalized": False, **rules})


MARKS = [mark(START), mark(END), mark(WIDE, lstrip=True, rstrip=True), mark(WORD, single_word=True)]
TOKENIZERS = {
    "plain": built(MARKS),
    "a space before each section": built(MARKS, normalizer=normalizers.Prepend("▁")),
    "white space is stripped": built(MARKS, normalizer=normalizers.Strip()),
    "a space before the first word": built(
        MARKS, pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    ),
    "a space before each word": built(
        MARKS, pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    ),
    "words": built(MARKS, pre_tokenizer=pre_tokenizers.Whitespace()),
    "names of one token within others": built(
        [*MARKS, mark("<|"), mark("a<|"), mark("|>b"), mark("ab", normalized=True)]
    ),
}


def marks_of(tokenizer: Tokenizer, least_chars: int) -> SectionMarks | None:
    added = tokenizer.get_added_tokens_decoder().values()
    return SectionMarks.of(added, START + END + WIDE + WORD, least_chars)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, least_chars=least)
def test_sections_are_tokenized_alone_as_within_the_text(
    kind: str, text: str, least_chars: int
) -> None:
    tokenizer = TOKENIZERS[kind]
    marks = marks_of(tokenizer, least_chars)
    sections = [text] if marks is None else marks.sections(text)
    alone = [i for s in sections for i in tokenizer.encode(s, add_special_tokens=False).ids]
    assert "".join(sections) == text
    assert alone == tokenizer.encode(text, add_special_tokens=False).ids


@given(text=texts, more=texts, least_chars=least)
def test_a_text_that_goes_on_has_the_same_whole_sections(
    text: str, more: str, least_chars: int
) -> None:
    marks = marks_of(TOKENIZERS["plain"], least_chars)
    assert marks is not None
    whole = marks.sections(text)[:-1]
    assert marks.sections(text + more)[: len(whole)] == whole


def test_only_tokens_that_are_found_whatever_is_beside_them_are_marks() -> None:
    marks = marks_of(TOKENIZERS["plain"], 0)
    assert marks is not None
    assert all(marks.pattern.fullmatch(name) for name in (START, END))
    assert not any(marks.pattern.search(name) for name in (WIDE, WORD))
    # In this vocabulary, another token may begin within a mark or end in it.
    assert marks_of(TOKENIZERS["names of one token within others"], 0) is None
    longer = built([mark(START), mark(END), mark(START + "x")])
    (only,) = [m for m in [marks_of(longer, 0)] if m is not None]
    assert not only.pattern.search(START)
    repeats = built([mark("<a><a>")])
    assert SectionMarks.of(repeats.get_added_tokens_decoder().values(), "<a><a>", 0) is None


def test_the_template_names_the_marks() -> None:
    """Some models have thousands of added tokens that no prompt contains."""
    added = TOKENIZERS["plain"].get_added_tokens_decoder().values()
    marks = SectionMarks.of(added, "{{ '" + START + "' }}", 0)
    assert marks is not None
    assert marks.sections(f"a{START}b{END}c") == ["a", f"{START}b{END}c"]
    assert SectionMarks.of(added, "{{ messages }}", 0) is None
