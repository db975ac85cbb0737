"""The next turn of a chat encodes only its new sections.

The cache of sections is bounded and used by one tenant only.
"""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.services.gateway.text.section_cache import SectionCache

OWNER = b"tenant"
section = st.text("ab", min_size=1, max_size=4)
chats = st.lists(section, min_size=1, max_size=6)


class Encoder:
    """Makes a token of each character, and records the encoded texts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, text: str) -> array[int]:
        self.encoded.append(text)
        return array("I", map(ord, text))


def tokens_of(sections: list[str]) -> array[int]:
    return array("I", map(ord, "".join(sections)))


def test_the_next_turn_encodes_only_what_is_new() -> None:
    cache, encoder = SectionCache(1 << 20), Encoder()
    first, second = ["system", "question", "answe"], ["system", "question", "answer", "more"]
    assert cache.encode(first, OWNER, encoder) == tokens_of(first)
    assert encoder.encoded == first
    encoder.encoded.clear()
    assert cache.encode(second, OWNER, encoder) == tokens_of(second)
    assert encoder.encoded == ["answer", "more"]
    num_chars = len("systemquestion")
    assert cache.num_reused_tokens == num_chars
    assert cache.num_encoded_tokens == len("".join(first + second)) - num_chars


def test_an_equal_section_after_another_text_is_another_section() -> None:
    cache, encoder = SectionCache(1 << 20), Encoder()
    cache.encode(["a", "same", "x"], OWNER, encoder)
    encoder.encoded.clear()
    cache.encode(["b", "same", "x"], OWNER, encoder)
    assert encoder.encoded == ["b", "same", "x"]


def test_a_tenant_reuses_nothing_of_anothers() -> None:
    """Otherwise the time to an answer would tell which texts another tenant has sent."""
    cache, encoder = SectionCache(1 << 20), Encoder()
    cache.encode(["secret", "x"], b"one", encoder)
    encoder.encoded.clear()
    cache.encode(["secret", "x"], b"another", encoder)
    assert encoder.encoded == ["secret", "x"]


def test_what_leaves_first_is_the_end_of_the_chat_that_was_used_least_recently() -> None:
    sections = [*"abcdefgh", "x"]
    size = SectionCache(1 << 20)
    size.encode(sections, OWNER, Encoder())
    cache, encoder = SectionCache(size.num_bytes), Encoder()
    cache.encode(sections, OWNER, encoder)
    cache.encode(["1", "2", "x"], OWNER, encoder)
    encoder.encoded.clear()
    cache.encode(sections, OWNER, encoder)
    assert encoder.encoded == ["g", "h", "x"]


@given(st.lists(chats, max_size=20), st.integers(0, 2000))
def test_tokens_are_those_of_the_whole_text_at_any_bound(
    texts: list[list[str]], max_bytes: int
) -> None:
    cache, encoder = SectionCache(max_bytes), Encoder()
    for sections in texts:
        assert cache.encode(sections, OWNER, encoder) == tokens_of(sections)
        assert cache.num_bytes <= max_bytes


class Bounded(RuleBasedStateMachine):
    """Encodes any chats of any tenants, and checks that the cache's memory is counted and
    bounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.encoder = SectionCache(3000), Encoder()
        self.num_tokens = 0

    @rule(sections=chats, owner=st.sampled_from([b"a", b"b"]))
    def encode(self, sections: list[str], owner: bytes) -> None:
        got = self.cache.encode(sections, owner, self.encoder)
        assert got == tokens_of(sections)
        self.num_tokens += len(got)

    @invariant()
    def counted(self) -> None:
        cache = self.cache
        assert 0 <= cache.num_bytes <= 3000
        assert (cache.num_bytes == 0) == (len(cache) == 0)
        assert cache.num_reused_tokens + cache.num_encoded_tokens == self.num_tokens
        assert cache.num_encoded_tokens == sum(map(len, self.encoder.encoded))


TestBounded = Bounded.TestCase
