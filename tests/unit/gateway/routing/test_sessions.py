"""The commands of one turn of the event loop go to an instance in messages within gRPC's limit."""

from __future__ import annotations

import pytest

from pdmesh.net.grpc.rpc import MAX_MESSAGE_BYTES
from pdmesh.services.gateway.routing.sessions import messages
from pdmesh.v1.instance_service_pb2 import Command, Prefill, SessionRequest


def prefill(key: int, num_bytes: int) -> Command:
    return Command(prefill=Prefill(key=key, prompt_token_ids=bytes(num_bytes)))


@pytest.mark.parametrize(
    ("num", "num_bytes", "num_messages"),
    [(0, 0, 0), (1, 100, 1), (5000, 100, 1), (256, 512 << 10, 18), (3, MAX_MESSAGE_BYTES // 2, 3)],
)
def test_commands_keep_their_order_and_no_message_is_too_large(
    num: int, num_bytes: int, num_messages: int
) -> None:
    """There are 256 prompts of 131,072 tokens, as from a few calls at once."""
    commands = [prefill(key, num_bytes) for key in range(num)]
    sent = [SessionRequest(commands=some) for some in messages(commands)]
    assert [c.prefill.key for message in sent for c in message.commands] == list(range(num))
    assert len(sent) == num_messages
    assert all(message.ByteSize() < MAX_MESSAGE_BYTES for message in sent)
