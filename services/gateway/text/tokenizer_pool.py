"""Loads the tokenizers of all models that clients ask this gateway for, within a memory bound.

A model's files come from the gateway's own folder if the folder has the same files. Otherwise they
are fetched from an instance of the model. If an instance does not answer soon, another instance is
asked as well. If a tokenizer cannot be loaded, requests for its model are refused until the next
attempt. Other models are not affected.

Only one tokenizer is parsed at a time. While the library parses, it holds the interpreter's lock
(30 ms for each MB), so all streams stop. The next tokenizer is parsed after a rest of four times
the parsing time, at most 2 s, so that streams can continue.

A call keeps its tokenizer until the call ends, even if the pool has dropped the tokenizer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from pdmesh.core.catalogue.tokenizer_memory import Residency
from pdmesh.errors import MeshError, Overloaded, TokenizerUnavailable
from pdmesh.net.tasks import end
from pdmesh.services.gateway.text.encoding_threads import EncodingQueues
from pdmesh.services.gateway.text.model_text import fetch_text
from pdmesh.services.gateway.text.section_cache import SectionCache
from pdmesh.services.gateway.text.tokenizer import BadModelDir, Tokenizer
from pdmesh.telemetry import metrics, names
from pdmesh.text_files import BadTextFiles, TextFiles, read_text_files
from pdmesh.v1.common_pb2 import InstanceRecord, ModelText

log = structlog.get_logger(__name__)

TextSources = Callable[[], Sequence[InstanceRecord]]  # the instances that have a model's files

_loads = metrics.counter(names.GATEWAY_TOKENIZER_LOADS, "Tokenizers loaded, by outcome")
_LOADED: Final = {names.ATTR_OUTCOME: "loaded"}
_FAILED: Final = {names.ATTR_OUTCOME: "failed"}

_WAIT_S: Final = 30.0  # how long a request waits for its model to be loaded
_FETCH_S: Final = 60.0  # how long one fetch of a model's files may take
_PARSE_S: Final = 60.0  # how long one parsing may take
_SILENT_S: Final = 2.0  # if an instance does not answer within this time, another one is asked
_MAX_SOURCES: Final = 3  # how many instances are asked for files in one attempt
_MAX_FETCHES: Final = 64  # how many fetches run at a time, since each needs space on the disk
_MAX_WAITING: Final = 1024  # how many requests may wait for tokenizers
_REST_RATIO: Final = 4.0  # the rest between two loads, as a multiple of the parsing time
_MOST_REST_S: Final = 2.0
# The memory of a tokenizer: for each byte of its files (measured), and a fixed part.
_BYTES_PER_FILE_BYTE: Final = 5
_BYTES_EACH: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenizerRules:
    """Settings of the pool. `max_chars` is the most characters that a rendered chat may have."""

    max_chars: int
    has_defaults: bool = True
    num_threads: int = 1
    num_long_threads: int = 0  # threads for long texts; 0 means two fewer than processors
    max_bytes: int = 512 << 20
    max_section_bytes: int = 64 << 20  # for the cached tokens of chats; 0 means no cache


class TokenizerPool:
    """The tokenizers in memory, by the digest of their files.

    A model whose instances have no tokenizer files uses the files of the gateway's own folder.
    """

    def __init__(self, rules: TokenizerRules, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules, self._clock = rules, clock
        self.queues = EncodingQueues(rules.num_threads, num_long_threads=rules.num_long_threads)
        self.sections = SectionCache(rules.max_section_bytes)
        self._own: TextFiles | None = None
        self._residency = Residency(rules.max_bytes)
        self._resident: dict[str, Tokenizer] = {}  # by digest
        self._loads: dict[str, asyncio.Task[Tokenizer]] = {}
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)
        self._turn = asyncio.Lock()  # held while a tokenizer is parsed
        self._rests_until = 0.0
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-load")
        self._make_gauges()

    async def load_own(self, folder: Path) -> None:
        """Load the tokenizer of `folder`, if it has a tokenizer.json. Raises BadModelDir."""
        try:
            files = await asyncio.to_thread(read_text_files, folder)
        except BadTextFiles as exc:
            log.info("tokenizer.no_own", reason=str(exc))
            return
        if not files.is_readable:
            log.info("tokenizer.no_own", reason="the folder has no tokenizer.json")
            return
        self._own = files
        self._keep(files, await self._parsed(files))

    async def get(self, model: str, text: ModelText | None, sources: TextSources) -> Tokenizer:
        """The tokenizer of a model.

        `text` describes the model's files, as the model's instances report them. `sources` returns
        the records of the instances that have these files.

        Raises TokenizerUnavailable, Overloaded.
        """
        digest = text.digest if text is not None else ""
        if not digest:
            if self._own is None:
                raise TokenizerUnavailable("neither the model's instances nor the gateway have one")
            digest = self._own.digest
        found = self._resident.get(digest)
        if found is not None:
            self._residency.used(digest)
            return found
        return await self._awaited(model, digest, sources)

    async def close(self) -> None:
        for task in list(self._loads.values()):
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.queues.close()

    async def _awaited(self, model: str, digest: str, sources: TextSources) -> Tokenizer:
        load = self._loads.get(digest)
        if load is None:
            now = self._clock()
            if (retry_at := self._residency.retry_at(digest, now)) is not None:
                raise _unavailable(retry_at - now)
            load = asyncio.create_task(self._load(model, digest, sources), name="tokenizer-load")
            load.add_done_callback(partial(self._on_loaded, digest))
            self._loads[digest] = load
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many requests wait for tokenizers")
        self._num_waiting += 1
        try:
            # If this request is cancelled, the load continues for other requests.
            await asyncio.wait({load}, timeout=_WAIT_S)
        finally:
            self._num_waiting -= 1
        if not load.done() or load.cancelled():
            raise _unavailable(1.0)
        return load.result()

    def _on_loaded(self, digest: str, load: asyncio.Task[Tokenizer]) -> None:
        del self._loads[digest]
        if not load.cancelled():
            load.exception()  # marks the error as read, because all waiting requests may have left

    async def _load(self, model: str, digest: str, sources: TextSources) -> Tokenizer:
        async with self._fetches:
            try:
                return await self._loaded(digest, sources)
            except (MeshError, OSError, TimeoutError) as exc:
                _loads.add(1, _FAILED)
                cause = exc.message if isinstance(exc, MeshError) else repr(exc)
                log.warning("tokenizer.failed", model=model, reason=cause)
                # An overloaded instance has the files, and its answer says when to ask again.
                if isinstance(exc, Overloaded):
                    raise _unavailable(_retry_s(exc)) from None
                now = self._clock()
                raise _unavailable(self._residency.failed(digest, now) - now) from None

    async def _loaded(self, digest: str, sources: TextSources) -> Tokenizer:
        files = await asyncio.to_thread(_unchanged, self._own, digest)
        if files is not None:
            tokenizer = await self._parsed_in_turn(files)
        else:
            with tempfile.TemporaryDirectory(prefix="pdmesh-tokenizer-") as folder:
                files = await _fetched(digest, sources, Path(folder))
                tokenizer = await self._parsed_in_turn(files)
        _loads.add(1, _LOADED)
        self._keep(files, tokenizer)
        return tokenizer

    async def _parsed_in_turn(self, files: TextFiles) -> Tokenizer:
        """Raises BadModelDir, TimeoutError."""
        async with self._turn:
            await asyncio.sleep(self._rests_until - time.monotonic())
            async with asyncio.timeout(_PARSE_S):
                return await self._parsed(files)

    async def _parsed(self, files: TextFiles) -> Tokenizer:
        """Raises BadModelDir."""
        load = partial(
            _load_guarded,
            files.folder,
            max_chars=self._rules.max_chars,
            queues=self.queues,
            sections=self.sections if self._rules.max_section_bytes else None,
            has_defaults=self._rules.has_defaults,
            vocabulary=files.vocabulary,
        )
        began_at = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, load)
        finally:
            now = time.monotonic()
            rest_s = min(_REST_RATIO * (now - began_at), _MOST_REST_S)
            self._rests_until = now + rest_s

    def _keep(self, files: TextFiles, tokenizer: Tokenizer) -> None:
        num_bytes = _BYTES_EACH + _BYTES_PER_FILE_BYTE * files.num_bytes
        self._resident[files.digest] = tokenizer
        leaving = self._residency.loaded(files.digest, num_bytes)
        for key in leaving:
            del self._resident[key]
        log.info("tokenizer.loaded", num_bytes=num_bytes, num_evicted=len(leaving))

    def _make_gauges(self) -> None:
        residency = self._residency
        metrics.gauge(names.GATEWAY_TOKENIZERS, "Tokenizers in memory", lambda: len(residency))
        metrics.gauge(
            names.GATEWAY_TOKENIZER_BYTES,
            "Memory of these tokenizers, estimated",
            lambda: residency.num_bytes,
            "By",
        )
        metrics.total(
            names.GATEWAY_TOKENIZERS_EVICTED,
            "Tokenizers that left memory for others",
            lambda: residency.num_evicted,
        )
        sections = self.sections
        metrics.gauge(
            names.GATEWAY_SECTION_BYTES,
            "Memory of the tokens that are kept for the next turns of chats",
            lambda: sections.num_bytes,
            "By",
        )
        metrics.total(
            names.GATEWAY_SECTIONS_EVICTED,
            "Sections of chats that left memory for others",
            lambda: sections.num_evicted,
        )
        metrics.total(
            names.GATEWAY_SECTION_TOKENS_REUSED,
            "Tokens of long chats that were not encoded again",
            lambda: sections.num_reused_tokens,
        )
        metrics.total(
            names.GATEWAY_SECTION_TOKENS_ENCODED,
            "Tokens of long chats that were encoded",
            lambda: sections.num_encoded_tokens,
        )


def _unchanged(own: TextFiles | None, digest: str) -> TextFiles | None:
    """The gateway's own files, if they have this digest and have not changed. Reads the disk."""
    if own is None or own.digest != digest:
        return None
    try:
        found = read_text_files(own.folder)
    except BadTextFiles:
        return None
    return found if found.digest == digest else None


# The type is Any because the arguments are passed on to `Tokenizer.load`.
def _load_guarded(folder: Path, **rules: Any) -> Tokenizer:
    """Raises BadModelDir for any failure, because the files may contain anything."""
    try:
        return Tokenizer.load(folder, **rules)
    except MeshError:
        raise
    except BaseException as exc:  # a panic of the library is not an Exception
        raise BadModelDir(f"the tokenizer cannot be read: {exc!r}") from exc


async def _fetched(digest: str, sources: TextSources, folder: Path) -> TextFiles:
    """Fetch the files from an instance.

    If no instance sends the files and one is overloaded, instances are asked again after the time
    that its answer gives, or somewhat later. Raises Overloaded if this time is too long. Also
    raises MeshError, OSError, TimeoutError.
    """
    folders = (folder / str(number) for number in itertools.count())
    time_left = asyncio.timeout(_FETCH_S)
    async with time_left:
        while True:
            try:
                return await _fetched_once(digest, sources(), folders)
            except Overloaded as busy:
                wait_s = _retry_s(busy) * random.uniform(1.0, 2.0)
                if asyncio.get_running_loop().time() + wait_s > (time_left.when() or 0.0):
                    raise
                await asyncio.sleep(wait_s)
    raise AssertionError("a timeout swallows nothing")


async def _fetched_once(
    digest: str, sources: Sequence[InstanceRecord], folders: Iterator[Path]
) -> TextFiles:
    """Ask some instances in random order, and return the first files that arrive.

    An instance that does not answer may only be slow, so its fetch continues while the next
    instance is asked. If all fail, raises Overloaded if any instance was overloaded, otherwise
    MeshError or OSError.
    """
    waiting = random.sample(sources, min(_MAX_SOURCES, len(sources)))
    asked: set[asyncio.Task[TextFiles]] = set()
    error: Exception = TokenizerUnavailable("no instance has the model's tokenizer files")
    try:
        while waiting or asked:
            if waiting:
                target = next(folders)
                target.mkdir()
                asked.add(asyncio.create_task(fetch_text(waiting.pop(), digest, target)))
            done, asked = await asyncio.wait(
                asked,
                timeout=_SILENT_S if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for failure in (task.exception() for task in done):
                if failure is not None and not isinstance(failure, MeshError | OSError):
                    raise failure
                if failure is not None and not isinstance(error, Overloaded):
                    error = failure
            for task in done:
                if task.exception() is None:
                    return task.result()
    finally:
        await end(asked)
    raise error


def _retry_s(busy: Overloaded) -> float:
    return max(busy.retry_after_ms or 0, 50) / 1000


def _unavailable(retry_s: float) -> TokenizerUnavailable:
    return TokenizerUnavailable(
        "this model's tokenizer cannot be loaded now; the gateway's log has the cause",
        retry_after_ms=max(1000, round(1000 * retry_s)),
    )
