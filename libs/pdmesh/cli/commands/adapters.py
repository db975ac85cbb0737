"""`pdmesh adapters`: manages LoRA adapters, which clients name in requests like models."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

from pdmesh.cli.leader import leader_of
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.v1 import admin_service_pb2 as pb

_SHOWN: Final = 12  # hex digits of a digest
Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


def run(options: argparse.Namespace) -> int:
    return asyncio.run(_ACTIONS[options.action](options))


async def _add(options: argparse.Namespace) -> int:
    calls = leader_of(options)
    response = await calls.add_adapter(options.adapter, options.path, options.model)
    show(options, response, lambda: _added_text(response))
    return 0


async def _list(options: argparse.Namespace) -> int:
    response = await leader_of(options).adapters()
    show(options, response, lambda: adapters_text(response))
    return 0


async def _remove(options: argparse.Namespace) -> int:
    response = await leader_of(options).remove_adapter(options.adapter)
    removed = f"{options.adapter} is removed; keep its files until its running requests have ended"
    show(options, response, lambda: removed)
    return 0


_ACTIONS: Final[Mapping[str, Command]] = {"add": _add, "list": _list, "remove": _remove}


def _added_text(response: pb.AddAdapterResponse) -> str:
    added, checked = response.adapter, ", ".join(response.instance_ids)
    return (
        f"{added.name}: {added.model}, rank {added.rank}, content {added.digest[:_SHOWN]}\n"
        f"checked by {checked}; it is loaded when it is first asked for"
    )


def adapters_text(adapters: pb.ListAdaptersResponse) -> str:
    rows = [
        (
            each.adapter.name, each.adapter.model, str(each.adapter.rank),
            f"{each.adapter.num_bytes / 1e6:.1f} MB", each.adapter.digest[:_SHOWN],
            ", ".join(each.instance_ids) or "-", each.adapter.path,
        )
        for each in adapters.adapters
    ]  # fmt: skip
    return table(("ADAPTER", "MODEL", "RANK", "SIZE", "CONTENT", "LOADED AT", "PATH"), rows)
