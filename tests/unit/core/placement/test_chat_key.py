"""Requests of one chat have the same key."""

from __future__ import annotations

from pdmesh.core.placement.chat_key import (
    key_of,
    key_of_beginning,
    key_of_id,
    num_in_beginning,
)

SECRET = b"secret"


def test_the_clients_id_counts_before_the_messages_and_these_before_the_first_block() -> None:
    hashed: list[str] = []

    def key(by_id: str, messages: bytes, blocks: list[bytes]) -> bytes:
        def by_beginning() -> bytes:
            hashed.append("messages")
            return messages

        def names() -> list[bytes]:
            hashed.append("blocks")
            return blocks

        return key_of(by_id, by_beginning, names)

    assert key("id", b"messages", [b"block", b"next"]) == b"id"
    assert not hashed
    assert key("", b"messages", [b"block", b"next"]) == b"messages"
    assert hashed == ["messages"], "a long prompt is not hashed for nothing"
    assert key("", b"", [b"block", b"next"]) == b"block"
    assert key("", b"", []) == b"", "then any gateway may take it"


def test_all_turns_of_a_chat_have_the_messages_up_to_the_first_of_the_user() -> None:
    turns = ["system", "user", "assistant", "user"]
    assert num_in_beginning(turns[:2]) == num_in_beginning(turns) == 2
    assert num_in_beginning(["user"]) == 1
    assert num_in_beginning(["system"]) >= 1, "all of them"


def test_equal_texts_of_other_tenants_or_meshes_have_other_keys() -> None:
    ids = {key_of_id(secret, t, "c") for secret in (SECRET, b"other") for t in ("a", "b")}
    assert len(ids) == 4
    texts = {key_of_beginning(secret, t, b"c") for secret in (SECRET, b"x") for t in ("a", "b")}
    assert len(texts) == 4
    assert key_of_id(SECRET, "a", "c") == key_of_id(SECRET, "a", "c")
    assert key_of_id(SECRET, "a", "") == ""
