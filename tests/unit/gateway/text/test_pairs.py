"""How a pair of texts is cut: as Hugging Face's tokenizers cut it, of the longer one first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from pdmesh.services.gateway.text.tokenizer import lengths_within

LENGTHS = st.integers(1, 40)


@given(LENGTHS, LENGTHS, st.integers(1, 90))
def test_the_lengths_are_those_of_the_library(first: int, second: int, room: int) -> None:
    library = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = WhitespaceSplit()
    library.enable_truncation(room, strategy="longest_first")
    encoding = library.encode("a " * first, "a " * second)
    types = encoding.type_ids
    assert lengths_within(first, second, room) == (types.count(0), types.count(1))
