"""A model's name is a hash of its files.

Each file is hashed once. A cached hash that another user could have written is not used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh.engine.vllm.model.file_digests import SETTLED_S, FileDigests, default_cache_dir
from pdmesh.engine.vllm.model.model_files import ModelFiles, decides_kv, read_model
from pdmesh.errors import EngineFailed

pytestmark = pytest.mark.req("S17", "S80")
WEIGHTS = "model.safetensors"
HEAD = b"header and embeddings" * 100_000  # 2 MB that are equal in all checkpoints of one layout
OLD = b"k_proj v_proj: before"
NEW = b"k_proj v_proj: after!"
Loaded = tuple[ModelFiles, FileDigests]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64, "model_type": "llama"}')
    (folder / WEIGHTS).write_bytes(HEAD + OLD)
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def later() -> float:
    """A time at which a test's files have been unchanged for longer than `SETTLED_S`."""
    return time.time() + 2 * SETTLED_S


def digests(cache_dir: Path | None = None) -> FileDigests:
    return FileDigests(cache_dir, clock=later)


def name_of(model_dir: Path, cache_dir: Path | None = None) -> str:
    return read_model(model_dir, digests(cache_dir)).digest


def beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 20)


def stored(cache_dir: Path) -> Path:
    (found,) = cache_dir.glob("*.json")
    return found


# -- which files count, and which part of them -----------------------------------------------------


def test_checkpoints_that_differ_only_in_k_and_v_projections_are_two_models(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.fakes.tiny_llama import write_tiny_llama

    original = write_tiny_llama(tmp_path / "original")
    again = write_tiny_llama(tmp_path / "again")
    tuned = write_tiny_llama(tmp_path / "tuned", kv_seed=1)
    sizes = {(d / WEIGHTS).stat().st_size for d in (original, again, tuned)}
    heads = {beginning(d / WEIGHTS) for d in (original, again, tuned)}
    assert len(sizes) == len(heads) == 1, "sizes and beginnings are equal: embeddings come first"
    assert name_of(original) == name_of(again)
    assert name_of(original) != name_of(tuned)


def test_a_model_is_identified_by_its_config_and_by_all_bytes_of_its_weights(
    model_dir: Path,
) -> None:
    before = name_of(model_dir)
    (model_dir / "config.json").write_text('{"model_type": "llama",  "hidden_size": 64}')
    assert name_of(model_dir) == before
    (model_dir / WEIGHTS).write_bytes(HEAD + NEW)
    assert name_of(model_dir) != before


@pytest.mark.parametrize(
    "name",
    [
        "model-00002.safetensors", "pytorch_model.bin", "model.gguf", "consolidated.00.pth",
        "model.pt",
        "model.safetensors.index.json", "quantize_config.json", "hf_quant_config.json",
        "adapter_config.json",
        "params.json", "config_of_next_year.json",
    ],
)  # fmt: skip
def test_every_file_that_may_decide_kv_is_part_of_the_name(model_dir: Path, name: str) -> None:
    assert decides_kv(name)
    before = name_of(model_dir)
    (model_dir / name).write_text("{}")
    assert name_of(model_dir) != before


@pytest.mark.parametrize(
    "name",
    [
        "README.md", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "vocab.json",
        "chat_template.jinja", "special_tokens_map.json", ".gitattributes", "pdmesh-manifest.json",
    ],
)  # fmt: skip
def test_settings_that_do_not_affect_kv_are_not_compared(model_dir: Path, name: str) -> None:
    before = name_of(model_dir)
    (model_dir / name).write_text("{}")
    assert name_of(model_dir) == before


def test_a_folder_without_a_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="--model") as caught:
        name_of(tmp_path)
    assert caught.value.reason == "MODEL_MISSING"


def test_a_folder_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / WEIGHTS).unlink()
    with pytest.raises(EngineFailed, match="no weights"):
        name_of(model_dir)


def test_files_that_an_artefact_verified_are_not_read_again(model_dir: Path) -> None:
    sha256 = hashlib.sha256((model_dir / WEIGHTS).read_bytes()).hexdigest()
    hashes_nothing = digests()
    hashes_nothing.stop()
    found = read_model(model_dir, hashes_nothing, {WEIGHTS: sha256})
    assert found.digest == name_of(model_dir)


# -- hashed once -----------------------------------------------------------------------------------


def forge(path: Path) -> None:
    """Replace the cached digests by impossible ones, and leave the rest of the entry."""
    read = json.loads(path.read_text())
    for entry in read["files"].values():
        entry[-1] = "0" * 64
    path.write_text(json.dumps(read))


def test_an_unchanged_file_is_hashed_once(model_dir: Path, cache_dir: Path) -> None:
    before = name_of(model_dir, cache_dir)
    assert name_of(model_dir, cache_dir) == before
    assert stored(cache_dir).stat().st_mode & 0o777 == 0o600
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    forge(stored(cache_dir))
    assert name_of(model_dir, cache_dir) != before, "the cached digest is used"


def _in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(len(HEAD))
        file.write(NEW)


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(HEAD + NEW)
    other.rename(path)


@pytest.mark.parametrize("change", [_in_place, _replaced])
def test_new_content_of_equal_size_and_time_is_hashed_again(
    change: Callable[[Path], None], model_dir: Path, cache_dir: Path
) -> None:
    before, path = name_of(model_dir, cache_dir), model_dir / WEIGHTS
    status = path.stat()
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert name_of(model_dir, cache_dir) != before


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:-9])


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _rewrite(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def rewritten(path: Path) -> None:
        read = json.loads(path.read_text())
        change(read)
        path.write_text(json.dumps(read))

    return rewritten


DOUBTFUL: dict[str, Callable[[Path], None]] = {
    "others may read it": lambda path: path.chmod(0o644),
    "others may write it": lambda path: path.chmod(0o620),
    "a link": _link,
    "a folder others may enter": lambda path: path.parent.chmod(0o755),
    "cut": _cut,
    "of another version": _rewrite(lambda read: read.update(version=2)),
    "no list of files": _rewrite(lambda read: read.update(files=[])),
    "an entry too short": _rewrite(lambda read: read["files"][WEIGHTS].pop(0)),
    "not a digest": _rewrite(lambda read: read["files"][WEIGHTS].__setitem__(5, "0" * 63)),
    "not numbers": _rewrite(lambda read: read["files"][WEIGHTS].__setitem__(0, True)),
}


@pytest.mark.parametrize("why", DOUBTFUL)
def test_a_doubtful_cache_is_ignored(why: str, model_dir: Path, cache_dir: Path) -> None:
    before = name_of(model_dir, cache_dir)
    forge(stored(cache_dir))
    DOUBTFUL[why](stored(cache_dir))
    assert name_of(model_dir, cache_dir) == before


def test_a_file_that_was_changed_just_now_is_not_remembered(
    model_dir: Path, cache_dir: Path
) -> None:
    """The file system would not show a second change within one tick of its clock."""
    now = (model_dir / WEIGHTS).stat().st_ctime_ns / 1e9
    FileDigests(cache_dir, clock=lambda: now).of(model_dir, [WEIGHTS])
    assert json.loads(stored(cache_dir).read_text())["files"] == {}


def test_the_number_of_cached_models_is_bounded(
    model_dir: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.engine.vllm.model.file_digests._MAX_FOLDERS", 3)
    for n in range(5):
        folder = model_dir.parent / f"model-{n}"
        shutil.copytree(model_dir, folder)
        name_of(folder, cache_dir)
        os.utime(newest(cache_dir), ns=(n, n))
    assert len(list(cache_dir.glob("*.json"))) == 3
    assert len(list(cache_dir.iterdir())) == 6, "three entries and their locks"


def newest(cache_dir: Path) -> Path:
    return max(cache_dir.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


def test_if_the_cache_cannot_be_made_files_are_hashed_each_time(
    model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert name_of(model_dir, tmp_path / "file" / "below") == name_of(model_dir)


def test_the_cache_works_on_a_file_system_without_locks(
    model_dir: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the lock daemon of a home directory on NFS is down."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert name_of(model_dir, cache_dir) == name_of(model_dir)


@pytest.mark.fault("F4")
def test_a_process_frozen_with_the_lock_does_not_block_others_forever(
    model_dir: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.engine.vllm.model.file_digests._LOCK_S", 0.2)
    with digests(cache_dir)._cache(model_dir):
        assert name_of(model_dir, cache_dir) == name_of(model_dir)


def test_the_cache_lies_in_the_home_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "pdmesh" / "digests"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_cache_dir() is None


def test_hashing_ends_when_the_engine_is_no_longer_wanted(model_dir: Path, cache_dir: Path) -> None:
    ours, theirs = digests(cache_dir), digests(cache_dir)
    with theirs._cache(model_dir):  # another process is hashing the folder
        ours.stop()
        with pytest.raises(EngineFailed, match="no longer wanted"):
            ours.of(model_dir, [WEIGHTS])
    with pytest.raises(EngineFailed, match="no longer wanted"):
        ours.of(model_dir, [WEIGHTS])


# -- while the model is loaded ---------------------------------------------------------------------


@pytest.fixture
def loaded(model_dir: Path, cache_dir: Path) -> Loaded:
    ours = digests(cache_dir)
    return read_model(model_dir, ours), ours


def _add(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"more")


def _remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _configure(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 65, "model_type": "llama"}')


@pytest.mark.parametrize(
    "change",
    [lambda f: _in_place(f / WEIGHTS), lambda f: _replaced(f / WEIGHTS), _add, _remove, _configure],
)
def test_a_model_that_changed_while_it_was_loaded_is_refused(
    change: Callable[[Path], None], loaded: Loaded, model_dir: Path
) -> None:
    files, ours = loaded
    change(model_dir)
    with pytest.raises(EngineFailed, match="changed") as caught:
        files.check_unchanged(ours)
    assert caught.value.reason == "MODEL_CHANGED"


def test_a_file_that_was_linked_touched_or_left_unchanged_is_not_hashed(
    loaded: Loaded, model_dir: Path
) -> None:
    files, ours = loaded
    files.check_unchanged(ours)
    # this happens when an artefact is built
    os.link(model_dir / WEIGHTS, model_dir.parent / "link")
    files.check_unchanged(ours)
    (model_dir / WEIGHTS).touch()
    files.check_unchanged(ours)
