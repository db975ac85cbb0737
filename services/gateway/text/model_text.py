"""Fetches a model's tokenizer files from an instance of the model, and checks their digest."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import IO, Any, Final

import grpc

from pdmesh.errors import MeshError, Unavailable
from pdmesh.net.grpc import rpc
from pdmesh.text_files import MAX_BYTES, BadTextFiles, TextFiles, is_text_file, read_text_files
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import GetModelTextRequest
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub

_FETCH_S: Final = 20.0
_MAX_FILES: Final = 64


class WrongText(MeshError):
    """The instance did not send the files that the registry lists for it."""

    default_reason = "WRONG_TEXT"


async def fetch_text(source: InstanceRecord, digest: str, folder: Path) -> TextFiles:
    """Fetch the files with this digest into an empty folder. Raises MeshError, OSError."""
    try:
        async with rpc.channel_to(source) as channel:
            # The type is Any because the stubs have no type for an asynchronous call.
            stub: Any = InstanceServiceStub(channel)
            await _write(stub, digest, folder)
    except grpc.aio.AioRpcError as exc:
        raise rpc.from_rpc_error(exc) from exc
    try:
        found = await asyncio.to_thread(read_text_files, folder)
    except BadTextFiles as exc:
        raise WrongText(str(exc)) from exc
    if found.digest != digest:
        raise WrongText("the model's files have changed since the instance loaded them")
    return found


async def _write(stub: Any, digest: str, folder: Path) -> None:
    num_bytes, names = 0, set[str]()
    current, file = "", None
    with contextlib.ExitStack() as stack:
        async for piece in stub.GetModelText(GetModelTextRequest(digest=digest), timeout=_FETCH_S):
            num_bytes += len(piece.data)
            if num_bytes > MAX_BYTES:
                raise WrongText(f"more than {MAX_BYTES} bytes of text")
            if file is None or piece.name != current:
                current, file = piece.name, stack.enter_context(_opened(folder, piece.name, names))
            await asyncio.to_thread(file.write, piece.data)
    if file is None:
        raise Unavailable("the instance sent no file")


def _opened(folder: Path, name: str, names: set[str]) -> IO[bytes]:
    if not is_text_file(name) or name in names or len(names) >= _MAX_FILES:
        raise WrongText("a file that is not one of the text files, or one twice")
    names.add(name)
    (folder / name).parent.mkdir(exist_ok=True)
    return (folder / name).open("xb")
