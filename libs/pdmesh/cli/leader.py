"""Calls the leading master with the user's token."""

from __future__ import annotations

import argparse

from pdmesh.cli.connect import connected
from pdmesh.cli.texts import text_of
from pdmesh.client.admin_calls import AdminCalls
from pdmesh.net.grpc.admin_client import Invoke, T, call_leader


def leader_of(options: argparse.Namespace) -> AdminCalls:
    """The admin calls to the leading master. Each call makes its own connection.

    Raises CommandFailed.
    """
    token = _token(options)

    async def ask(invoke: Invoke[T], /) -> T:
        async with connected(options) as bus:
            return await call_leader(bus, token, invoke)

    return AdminCalls(ask)


def _token(options: argparse.Namespace) -> str:
    if options.admin_token_file is None:
        return str(options.admin_token)
    return text_of(options.admin_token_file).strip()
