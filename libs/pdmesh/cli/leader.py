"""Calls the leading master with the admin token."""

from __future__ import annotations

import argparse

from pdmesh.cli.connect import connected
from pdmesh.cli.texts import text_of
from pdmesh.net.grpc.admin_client import Invoke, T, call_leader


async def ask_leader(options: argparse.Namespace, invoke: Invoke[T]) -> T:
    """Call the leading master. Raises MeshError if it refuses, or if no master leads."""
    token = _token(options)
    async with connected(options) as bus:
        return await call_leader(bus, token, invoke)


def _token(options: argparse.Namespace) -> str:
    if options.admin_token_file is None:
        return str(options.admin_token)
    return text_of(options.admin_token_file).strip()
