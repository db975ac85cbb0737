"""The wire format of KV transfers: every message survives encoding, and nothing else is
accepted.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.core.kv.transfer.ticket import Refusal
from pdmesh.kv.agent import wire

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=24)


@st.composite
def metas(draw: st.DrawFn) -> wire.Meta:
    lengths = draw(st.lists(st.integers(1, 300), max_size=8))
    start = draw(st.sampled_from([0, 0, 77])) if lengths else 0
    ranges, end = [], start
    for length in lengths:
        ranges.append(wire.Range(end, length, draw(st.binary(min_size=16, max_size=16))))
        end += length
    inline = memoryview(bytes(end - start)) if draw(st.booleans()) else None
    more = draw(st.integers(0, 2**40)) if lengths else 0
    return wire.Meta(draw(u64), end + more, tuple(ranges), inline, draw(u64))


messages = st.one_of(
    st.builds(wire.Pull, u64, ids, u32, u64, u64, u32, u32, u32, st.integers(1, 255), u64),
    metas(),
    st.builds(wire.PullRefusal, u64, st.sampled_from(Refusal)),
    st.builds(wire.Ack, u64, st.booleans()),
    st.builds(wire.Renew, ids, u32, u64),
    st.builds(wire.Probe, u64, u64, u64, st.binary(min_size=16, max_size=16)),
    st.builds(
        wire.Fetch,
        u64,
        u64,
        u64,
        st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=20).map(tuple),
    ),
)


def encoded(message: wire.Message) -> bytes:
    return b"".join(wire.encode(message))


@given(messages)
def test_an_encoded_message_is_parsed_unchanged(message: wire.Message) -> None:
    assert wire.parse(memoryview(encoded(message))) == message


@pytest.mark.fault("F34")
@given(st.binary(max_size=400))
@example(b"")
@example(b"PDKV")
def test_any_bytes_are_a_message_or_raise_the_typed_error(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.parse(memoryview(data))


@pytest.mark.fault("F34", "F25")
@given(messages, st.data())
def test_a_corrupted_message_is_a_message_or_raises_the_typed_error(
    message: wire.Message, data: st.DataObject
) -> None:
    raw = bytearray(encoded(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.WireError):
        parsed = wire.parse(memoryview(raw))
        if isinstance(parsed, wire.Meta):
            assert parsed.offset + parsed.length <= parsed.num_bytes
            assert parsed.inline is None or len(parsed.inline) == parsed.length


@pytest.mark.fault("F34")
@settings(deadline=None, max_examples=40)
@given(messages)
def test_no_message_with_one_flipped_bit_is_accepted(message: wire.Message) -> None:
    """Inline bytes are an exception. META has a checksum for each range of inline bytes, so that
    corrupt bytes count against their source.
    """
    raw = bytearray(encoded(message))
    inline = message.inline if isinstance(message, wire.Meta) else None
    for bit in range(8 * (len(raw) - len(inline or b""))):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.WireError):
            wire.parse(memoryview(raw))
        raw[bit // 8] ^= 1 << bit % 8
    assert wire.parse(memoryview(raw)) == message


@pytest.mark.fault("F25")
@given(messages)
def test_a_truncated_message_is_refused(message: wire.Message) -> None:
    raw = memoryview(encoded(message))
    for end in range(0, len(raw), max(1, len(raw) // 40)):
        with pytest.raises(wire.WireError):
            wire.parse(raw[:end])


@pytest.mark.fault("F34")
@pytest.mark.parametrize("at", range(8))
def test_every_byte_of_magic_version_kind_and_reserved_matters(at: int) -> None:
    raw = bytearray(encoded(wire.Pull(1, "t", 1, 2, 3, 0)))
    raw[at] ^= 0x80
    with pytest.raises(wire.WireError):
        wire.parse(memoryview(raw))


@pytest.mark.req("S49")
def test_ranges_with_a_gap_or_an_overlap_are_refused() -> None:
    for second in (5, 3):
        ranges = (wire.Range(0, 4, bytes(16)), wire.Range(second, 4, bytes(16)))
        raw = encoded(wire.Meta(1, 8, ranges))
        with pytest.raises(wire.WireError, match="gap"):
            wire.parse(memoryview(raw))


def test_the_largest_message_fits_the_transport() -> None:
    from pdmesh.kv.transport.base import MAX_MESSAGE

    size = wire.MAX_INLINE // wire.MAX_RANGES
    ranges = tuple(wire.Range(i * size, size, bytes(16)) for i in range(wire.MAX_RANGES))
    meta = wire.Meta(1, wire.MAX_INLINE, ranges, memoryview(bytes(wire.MAX_INLINE)))
    raw = encoded(meta)
    assert len(raw) <= MAX_MESSAGE
    assert wire.parse(memoryview(raw)) == meta
