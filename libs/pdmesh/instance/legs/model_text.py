"""Sends a gateway the model's tokenizer files, in pieces of bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from pdmesh.errors import InvalidRequest, Overloaded, Unavailable
from pdmesh.text_files import TextFiles
from pdmesh.v1.instance_service_pb2 import GetModelTextResponse

_MAX_READERS: Final = 4  # each holds one piece in memory


class ModelTextSource:
    """`text` is None if this instance has no tokenizer files."""

    def __init__(self, text: TextFiles | None) -> None:
        self._text = text
        self._num_readers = 0

    async def pieces(self, digest: str) -> AsyncGenerator[GetModelTextResponse, None]:
        """Yield the files with this digest.

        A file may have changed since the engine was loaded, so the gateway must check that the
        received files have this digest. Raises InvalidRequest, Overloaded, Unavailable.
        """
        text = self._text
        if text is None or text.digest != digest:
            raise InvalidRequest("this instance has different tokenizer files", field="digest")
        if self._num_readers >= _MAX_READERS:
            raise Overloaded("too many gateways read this model's tokenizer files")
        self._num_readers += 1
        try:
            pieces = text.pieces()
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield GetModelTextResponse(name=piece[0], data=piece[1])
        except OSError as exc:
            raise Unavailable(f"a tokenizer file cannot be read: {exc.strerror}") from exc
        finally:
            self._num_readers -= 1
