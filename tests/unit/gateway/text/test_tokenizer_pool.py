"""The tokenizers of a gateway's models.

They are fetched from instances, checked, bounded in memory, and parsed one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh import text_files
from pdmesh.errors import Overloaded, TokenizerUnavailable
from pdmesh.instance.legs.model_text import ModelTextSource
from pdmesh.net.grpc import rpc
from pdmesh.net.tasks import end
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool, TokenizerRules
from pdmesh.text_files import TextFiles, read_text_files
from pdmesh.v1 import instance_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord, ModelText
from tests.fakes.tiny_model import write_tiny_model
from tests.support.waiting import until

RULES = TokenizerRules(max_chars=10_000)


class Library:
    """An instance that serves the files of many models. A test controls its answers."""

    def __init__(self) -> None:
        self.texts: dict[str, TextFiles] = {}
        self.num_asked = 0
        self.num_busy = 0  # how many of the next requests are refused as Overloaded
        self.busy_ms = 10
        self.gate = asyncio.Event()
        self.gate.set()
        self.change: Callable[[pb.GetModelTextResponse], pb.GetModelTextResponse] = lambda r: r
        self.record = InstanceRecord()

    def add(self, folder: Path) -> ModelText:
        text = read_text_files(folder)
        self.texts[text.digest] = text
        return ModelText(digest=text.digest, vocabulary=text.vocabulary)

    def sources(self) -> list[InstanceRecord]:
        return [self.record]

    async def GetModelText(
        self, request: pb.GetModelTextRequest, context: Any
    ) -> AsyncIterator[pb.GetModelTextResponse]:
        self.num_asked += 1
        await self.gate.wait()
        if self.num_busy:
            self.num_busy -= 1
            raise Overloaded("too many readers", retry_after_ms=self.busy_ms)
        source = ModelTextSource(self.texts.get(request.digest))
        async for piece in source.pieces(request.digest):
            yield self.change(piece)

    async def never(self, request: Any, context: Any) -> Any:
        raise AssertionError("not asked here")

    Session = GetStatus = GetKvSnapshot = InspectAdapter = never


def instance_at(port: int) -> InstanceRecord:
    return InstanceRecord(grpc_address=f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def serving_library() -> AsyncIterator[Library]:
    server, library = rpc.server(), Library()
    rpc.add_service(server, pb.DESCRIPTOR.services_by_name["InstanceService"], library)
    library.record = instance_at(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    yield library
    library.gate.set()
    await server.stop(0)


@pytest.fixture
async def library() -> AsyncIterator[Library]:
    async with serving_library() as library:
        yield library


@pytest.fixture
async def hanging() -> AsyncIterator[Library]:
    """An instance that accepts requests and does not answer them."""
    async with serving_library() as library:
        library.gate.clear()
        yield library


@contextlib.asynccontextmanager
async def pool_of(rules: TokenizerRules = RULES, **more: Any) -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(rules, **more)
    try:
        yield pool
    finally:
        await pool.close()


def spelt(tokenizer: Tokenizer) -> str:
    return tokenizer.text_stream(()).feed([10, 11, 12])


async def test_each_model_gets_its_own_tokenizer_which_is_fetched_once(
    tmp_path: Path, library: Library
) -> None:
    texts = [library.add(write_tiny_model(tmp_path / str(i), shift=i)) for i in range(3)]
    async with pool_of() as pool:
        asks = [pool.get(f"m{i}", text, library.sources) for i, text in enumerate(texts)]
        first = await asyncio.gather(*asks, *asks_again(pool, texts, library))
        assert library.num_asked == 3
        for number, tokenizer in enumerate(first[:3]):
            own = Tokenizer.load(tmp_path / str(number), max_chars=100)
            assert spelt(tokenizer) == spelt(own)
            assert tokenizer.vocabulary == texts[number].vocabulary
            assert tokenizer is first[3 + number]
        assert len({spelt(tokenizer) for tokenizer in first}) == 3


def asks_again(pool: TokenizerPool, texts: list[ModelText], library: Library) -> list[Any]:
    return [pool.get(f"m{i}", text, library.sources) for i, text in enumerate(texts)]


async def test_files_in_the_gateways_own_folder_are_not_fetched(
    tmp_path: Path, library: Library
) -> None:
    text = library.add(write_tiny_model(tmp_path / "theirs"))
    async with pool_of() as pool:
        await pool.load_own(write_tiny_model(tmp_path / "own"))
        own = await pool.get("m", text, library.sources)
        assert own is await pool.get("older", None, list), "even if the instances give no files"
    assert library.num_asked == 0


async def test_without_any_files_a_model_is_refused(tmp_path: Path) -> None:
    async with pool_of() as pool:
        await pool.load_own(tmp_path / "absent")
        with pytest.raises(TokenizerUnavailable):
            await pool.get("m", None, list)


async def test_tokenizers_are_parsed_one_at_a_time_and_a_caller_that_leaves_stops_no_load(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [library.add(write_tiny_model(tmp_path / str(i), shift=i)) for i in range(4)]
    num_parsing, most_parsing, load = 0, 0, Tokenizer.load

    def counted(*args: Any, **kwargs: Any) -> Tokenizer:
        nonlocal num_parsing, most_parsing
        num_parsing += 1
        most_parsing = max(most_parsing, num_parsing)
        try:
            return load(*args, **kwargs)
        finally:
            num_parsing -= 1

    monkeypatch.setattr(Tokenizer, "load", counted)
    library.gate.clear()
    async with pool_of() as pool:
        asks = [
            asyncio.create_task(pool.get(f"m{i}", text, library.sources))
            for i, text in enumerate(texts)
        ]
        await until(lambda: library.num_asked == 4)
        asks[0].cancel()
        library.gate.set()
        await asyncio.gather(*asks[1:])
        assert spelt(await pool.get("m0", texts[0], library.sources))
        assert library.num_asked == 4, "the cancelled caller's load went on"
        assert most_parsing == 1


async def test_an_instance_that_hangs_delays_no_other_model(
    tmp_path: Path, library: Library, hanging: Library
) -> None:
    silent = [library.add(write_tiny_model(tmp_path / str(i), shift=i)) for i in range(3)]
    text = library.add(write_tiny_model(tmp_path / "m", shift=9))
    async with pool_of() as pool:
        asks = [
            asyncio.create_task(pool.get(f"m{i}", each, hanging.sources))
            for i, each in enumerate(silent)
        ]
        await until(lambda: hanging.num_asked == 3)
        assert await pool.get("m", text, library.sources)
        assert not any(ask.done() for ask in asks)
        await end(asks)


async def test_while_an_instance_is_silent_another_one_is_asked(
    tmp_path: Path, library: Library, hanging: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.services.gateway.text.tokenizer_pool._SILENT_S", 0.05)
    text = library.add(write_tiny_model(tmp_path / "m"))
    monkeypatch.setattr("random.sample", lambda found, count: list(found)[:count])
    async with pool_of() as pool:
        assert await pool.get("m", text, lambda: [library.record, hanging.record])
    assert (hanging.num_asked, library.num_asked) == (1, 1)


async def test_an_instance_that_was_silent_may_still_answer(
    tmp_path: Path, hanging: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has just been restarted, all instances are slow."""
    monkeypatch.setattr("pdmesh.services.gateway.text.tokenizer_pool._SILENT_S", 0.05)
    text = hanging.add(write_tiny_model(tmp_path / "m"))
    async with pool_of() as pool:
        asking = asyncio.create_task(pool.get("m", text, lambda: [hanging.record] * 3))
        await until(lambda: hanging.num_asked == 3)
        hanging.gate.set()
        assert await asking


async def test_an_instance_that_was_overloaded_is_asked_again(
    tmp_path: Path, library: Library
) -> None:
    text = library.add(write_tiny_model(tmp_path / "m"))
    library.num_busy = 3
    async with pool_of() as pool:
        assert await pool.get("m", text, library.sources)
    assert library.num_asked == 4


async def test_the_wait_does_not_grow_while_instances_stay_busy(
    tmp_path: Path, library: Library
) -> None:
    text = library.add(write_tiny_model(tmp_path / "m"))
    library.busy_ms = 100_000
    async with pool_of(clock=lambda: 100.0) as pool:
        for _ in range(3):
            library.num_busy = 1
            with pytest.raises(TokenizerUnavailable) as failed:
                await pool.get("m", text, lambda: [instance_at(1), library.record])
            assert failed.value.retry_after_ms == library.busy_ms
        assert await pool.get("m", text, library.sources)


def another_byte(piece: pb.GetModelTextResponse) -> pb.GetModelTextResponse:
    return pb.GetModelTextResponse(name=piece.name, data=piece.data.replace(b"<eos>", b"<fos>"))


def outside(piece: pb.GetModelTextResponse) -> pb.GetModelTextResponse:
    return pb.GetModelTextResponse(name=f"../{piece.name}", data=piece.data)


def code(piece: pb.GetModelTextResponse) -> pb.GetModelTextResponse:
    return pb.GetModelTextResponse(name="tokenization_evil.py", data=piece.data)


@pytest.mark.parametrize("change", [another_byte, outside, code])
async def test_files_of_another_model_are_refused_and_fetched_again_later(
    tmp_path: Path, library: Library, change: Any
) -> None:
    now = 100.0
    bad = library.add(write_tiny_model(tmp_path / "bad"))
    good = library.add(write_tiny_model(tmp_path / "good", shift=1))
    async with pool_of(clock=lambda: now) as pool:
        library.change = change
        with pytest.raises(TokenizerUnavailable) as failed:
            await pool.get("bad", bad, library.sources)
        assert failed.value.retry_after_ms == 5000
        assert str(tmp_path) not in failed.value.message
        library.change = lambda piece: piece
        num_asked = library.num_asked
        with pytest.raises(TokenizerUnavailable):
            await pool.get("bad", bad, library.sources)
        assert library.num_asked == num_asked, "a failed fetch is not tried again so soon"
        assert await pool.get("good", good, library.sources), "another model is not affected"
        now += 5.0
        assert await pool.get("bad", bad, library.sources)
    assert not (tmp_path.parent / "tokenizer.json").exists()


async def test_a_fetch_of_more_bytes_than_a_model_needs_is_given_up(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = library.add(write_tiny_model(tmp_path / "m"))
    monkeypatch.setattr("pdmesh.services.gateway.text.model_text.MAX_BYTES", 1000)
    async with pool_of() as pool:
        with pytest.raises(TokenizerUnavailable):
            await pool.get("m", text, library.sources)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 7}}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("chat_template.jinja", "{% if %}"),
        ("config.json", '{"vocab_size": "many", "text_config": 3'),
    ],
)
async def test_unreadable_files_do_not_count_as_a_bug_of_the_gateway(
    tmp_path: Path, library: Library, name: str, content: str
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / name).write_text(content)
    text = library.add(folder)
    async with pool_of() as pool:
        with pytest.raises(TokenizerUnavailable):
            await pool.get("m", text, library.sources)


async def test_if_an_instance_is_gone_another_one_is_asked(
    tmp_path: Path, library: Library
) -> None:
    text = library.add(write_tiny_model(tmp_path / "m"))
    async with pool_of() as pool:
        sources = [instance_at(1), library.record, instance_at(2)]
        assert await pool.get("m", text, lambda: sources)


async def test_a_dropped_tokenizer_is_freed_when_its_last_call_ends(
    tmp_path: Path, library: Library
) -> None:
    """The reference count must free it. A gateway rarely collects garbage, and never its first
    objects.
    """
    texts = [library.add(write_tiny_model(tmp_path / str(i), shift=i)) for i in range(2)]
    gc.disable()
    try:
        async with pool_of(TokenizerRules(max_chars=100, max_bytes=1)) as pool:
            first = await pool.get("m0", texts[0], library.sources)
            stream = first.text_stream(())
            assert first.token_bytes(40)
            assert await first.encode("x" * 5000, add_special_tokens=False), (
                "the tokenizer is freed on a thread"
            )
            gone = weakref.ref(first._decoder)
            del first
            await pool.get("m1", texts[1], library.sources)
            assert stream.feed([10, 11]), "the running call is not affected"
            assert gone() is not None
            del stream
            assert gone() is None
            assert spelt(await pool.get("m0", texts[0], library.sources)), (
                "the model can be loaded again"
            )
            assert library.num_asked == 3
    finally:
        gc.enable()


def write_large_model(folder: Path, number: int, num_words: int = 8_000) -> Path:
    """Write a model whose vocabulary has half a megabyte."""
    write_tiny_model(folder, shift=1)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"w{number}x{i:06}{'y' * 40}": 300 + i for i in range(num_words)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_hundred_models_take_only_the_memory_of_those_that_fit(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten models fit. A hundred models, each requested twice, take less than three times the memory
    of ten.
    """
    monkeypatch.setattr("pdmesh.services.gateway.text.tokenizer_pool._REST_RATIO", 0.0)
    texts = [library.add(write_large_model(tmp_path / str(i), i)) for i in range(100)]
    files = read_text_files(tmp_path / "0")
    assert files.num_bytes < text_files.MAX_BYTES
    async with (
        pool_of() as warm
    ):  # the first tokenizer of a process takes extra memory, which does not count here
        await warm.get("m", texts[0], library.sources)
    before = resident_bytes()
    room = 10 * (5 * files.num_bytes + (1 << 20)) + 1000
    async with pool_of(TokenizerRules(max_chars=100, max_bytes=room)) as pool:
        for number in range(10):
            await pool.get(f"m{number}", texts[number], library.sources)
        of_ten = resident_bytes() - before
        assert of_ten > 10 * files.num_bytes, "ten tokenizers must take measurable memory"
        assert of_ten < 2 * room, "they take at most twice the estimate"
        for _ in range(2):
            for number, text in enumerate(texts):
                await pool.get(f"m{number}", text, library.sources)
        assert 9 <= len(pool._resident) <= 10
        assert resident_bytes() - before < 3 * of_ten
