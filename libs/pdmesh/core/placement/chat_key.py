"""Decides which requests belong to one chat, so that a proxy sends them to the same gateway.

The key of a chat is made from the chat's id, if the client gives one. Without an id, the key is
made from the messages up to the first user message, because all turns of a chat begin with them. A
completion has no messages, so its key is made from the first block of its prompt. Equal texts of
different tenants have different keys, and no key reveals its text. `gateway_ranking.py` chooses the
gateway for a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence


def key_of_id(secret: bytes, tenant: str, chat_id: str) -> str:
    """The key of the tenant's chat with this id, or empty without a `chat_id`."""
    if not chat_id:
        return ""
    return hashlib.blake2b(
        chat_id.encode(), digest_size=16, key=_key(secret, tenant), person=b"chat"
    ).hexdigest()


def key_of_beginning(secret: bytes, tenant: str, beginning: bytes) -> bytes:
    """The key of a chat without an id.

    `beginning` has the messages that `num_in_beginning` counts, in a canonical form.
    """
    return hashlib.blake2b(beginning, digest_size=16, key=_key(secret, tenant)).digest()


def num_in_beginning(roles: Sequence[str]) -> int:
    """The number of messages up to and including the first user message.

    All turns of a chat begin with these messages.
    """
    return next((i for i, role in enumerate(roles) if role == "user"), len(roles)) + 1


def key_of(
    by_id: str, by_beginning: Callable[[], bytes], blocks: Callable[[], Sequence[bytes]]
) -> bytes:
    """The first of the three keys that is not empty. Later keys are not computed.

    `blocks` returns the names of the prompt's KV blocks. The first of these names is the third key.
    """
    return by_id.encode() or by_beginning() or next(iter(blocks()), b"")


def _key(secret: bytes, tenant: str) -> bytes:
    return hmac.digest(secret, tenant.encode(), "sha256")
