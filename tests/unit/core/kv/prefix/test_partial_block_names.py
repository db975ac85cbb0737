"""Sampled prefix hashing: where beginnings of a block are named, and where a conversation's earlier
turns ended.
"""

from __future__ import annotations

import pytest

from pdmesh.core.kv.prefix.block_hash import block_hashes, tokens_to_bytes
from pdmesh.core.kv.prefix.partial_block_names import PartialSampling, partial_names, turn_ends

ROOT = b"r" * 16
IM_END, IM_START, USER, ASSISTANT, NEWLINE = 2, 1, 10, 11, 12


@pytest.mark.req("S103")
@pytest.mark.parametrize(
    ("num_tokens", "positions"),
    [
        (0, []),
        (1, [1]),
        (207, [207]),
        (208, [208]),
        (209, [208]),
        (212, [208, 212]),
        (1000, list(range(208, 1001, 4))),
    ],
)
def test_positions_are_those_of_the_paper(num_tokens: int, positions: list[int]) -> None:
    assert list(PartialSampling().positions(num_tokens)) == positions


@pytest.mark.req("S103")
def test_start_and_step_are_parameters_and_no_step_means_no_names() -> None:
    assert list(PartialSampling(start=16, step=8).positions(40)) == [16, 24, 32, 40]
    assert list(PartialSampling(step=0).positions(500)) == []
    assert not PartialSampling(step=0)


@pytest.mark.req("S103")
def test_a_name_depends_on_root_parent_and_tokens_and_is_never_that_of_a_full_block() -> None:
    tokens = list(range(64))
    data, parent = tokens_to_bytes(tokens), b"p" * 16
    names = partial_names(ROOT, parent, data, [16, 64])
    assert names[16] == partial_names(ROOT, parent, data[: 16 * 4], [16])[16]
    full = block_hashes(ROOT, tokens, 64, parent)
    others = [
        partial_names(b"s" * 16, parent, data, [16])[16],
        partial_names(ROOT, b"", data, [16])[16],
        partial_names(ROOT, parent, tokens_to_bytes([*tokens[:15], 99]), [16])[16],
        names[64],
        *full,
    ]
    assert names[16] not in others
    assert len(set(others)) == len(others)


def turn(role: int, *tokens: int) -> list[int]:
    return [IM_START, role, NEWLINE, *tokens, IM_END, NEWLINE]


@pytest.mark.req("S103")
def test_earlier_turns_are_found_by_the_ending_that_the_template_gives_each_prompt() -> None:
    asking = [IM_START, ASSISTANT, NEWLINE]
    first = [*turn(USER, 100, 101), *asking]
    answered = [*first, 200, 201, 202]
    second = [*answered, IM_END, NEWLINE, *turn(USER, 103), *asking]
    third = [*second, 204, IM_END, NEWLINE, *turn(USER, 105), *asking]
    assert turn_ends(tokens_to_bytes(second), {IM_END}) == [len(answered), len(first)]
    assert turn_ends(tokens_to_bytes(third), {IM_END}) == [
        len(second) + 1,
        len(second),
        len(answered),
        len(first),
    ]
    assert turn_ends(tokens_to_bytes(third), {IM_END}, max_ends=1) == [len(second) + 1]


@pytest.mark.parametrize("tokens", [[], [5], [IM_END], list(range(100, 200)), [IM_END] * 50])
def test_a_request_without_a_conversation_has_no_turns(tokens: list[int]) -> None:
    ends = turn_ends(tokens_to_bytes(tokens), {IM_END})
    assert all(0 < end < len(tokens) for end in ends)
    assert len(ends) <= 4
    if IM_END not in tokens:
        assert ends == []


def test_bytes_that_look_like_a_stop_token_across_two_tokens_are_not_one() -> None:
    shifted = IM_END << 16  # it holds the bytes of IM_END, shifted by two
    tokens = [IM_START, shifted, 0, shifted, 7, IM_END, NEWLINE]
    assert turn_ends(tokens_to_bytes(tokens), {IM_END}) == []
