"""An artefact is a model's files for one role, with a manifest. Only a verified artefact is
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.cli.app import main
from pdmesh.core.model import Role, RoleSpec
from pdmesh.engine.factory import EngineSettings
from pdmesh.errors import EngineFailed
from pdmesh.instance.incarnation import artefact, loading
from pdmesh.instance.incarnation.loading import PartTimes, with_artefact
from pdmesh.instance.incarnation.role_settings import RoleRefused, settings_for
from pdmesh.services.instance.settings import Settings

pytestmark = pytest.mark.req("S17", "S20")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "smol"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(1000))
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


def test_a_built_artefact_can_be_read_again(model_dir: Path, tmp_path: Path) -> None:
    path = artefact.build(model_dir, "decode", tmp_path / "a" / "d", config={"dtype": "float32"})
    found = artefact.read(path)
    artefact.verify(found)
    artefact.check_role(found, Role.DECODE)
    manifest = found.manifest
    assert (manifest.role, manifest.model, manifest.config) == (
        "decode",
        "smol",
        {"dtype": "float32"},
    )
    assert [f.path for f in manifest.files] == ["tokenizer/vocab.json", "weights.bin"]
    assert (found.folder / "weights.bin").stat().st_ino == (model_dir / "weights.bin").stat().st_ino
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"d"}, "nothing half-made is left"


def test_the_artefacts_of_both_roles_have_one_revision_and_an_upgrade_another(
    model_dir: Path, tmp_path: Path
) -> None:
    def revision(name: str, role: str, **config: str) -> str:
        path = artefact.build(model_dir, role, tmp_path / name, config=config)  # type: ignore[arg-type]
        return artefact.read(path).manifest.revision

    first = revision("p", "prefill", dtype="float32", num_slots="4")
    assert revision("d", "decode", dtype="float32", num_slots="64") == first
    assert revision("d16", "decode", dtype="bfloat16") != first, "the KV would have other bytes"
    (model_dir / "weights.bin").unlink()
    (model_dir / "weights.bin").write_bytes(bytes(999) + b"\1")
    assert revision("p2", "prefill", dtype="float32") != first


def _cut(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").write_bytes(bytes(999))


def _change(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").write_bytes(bytes(999) + b"\1")


def _remove(folder: Path) -> None:
    (folder / "tokenizer" / "vocab.json").unlink()


@pytest.mark.parametrize("damage", [_cut, _change, _remove])
def test_a_file_that_changed_since_the_build_is_named(
    damage: Callable[[Path], None], model_dir: Path, tmp_path: Path
) -> None:
    found = artefact.read(artefact.build(model_dir, "prefill", tmp_path / "p"))
    damage(found.folder)
    with pytest.raises(RoleRefused) as refused:
        artefact.verify(found)
    assert refused.value.reason == "WRONG_HASH"
    assert refused.value.field in ("weights.bin", "tokenizer/vocab.json")


def test_the_other_roles_artefact_is_refused(model_dir: Path, tmp_path: Path) -> None:
    found = artefact.read(artefact.build(model_dir, "prefill", tmp_path / "p"))
    with pytest.raises(RoleRefused) as refused:
        artefact.check_role(found, Role.DECODE)
    assert refused.value.reason == "WRONG_ROLE"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": "both"}, "role"),
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"files": [{"path": "a", "size": 1, "sha256": "ab"}]}, "files.0.sha256"),
        ({"files": [{"path": "a", "size": True, "sha256": "0" * 64}]}, "files.0.size"),
        ({"files": [{"path": "../../etc/passwd", "size": 1, "sha256": "0" * 64}]}, None),
        ({"files": [{"path": "/etc/passwd", "size": 1, "sha256": "0" * 64}]}, None),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_the_refusal_of_a_bad_manifest_names_its_field(
    changes: dict[str, object], field: str | None, model_dir: Path, tmp_path: Path
) -> None:
    path = artefact.build(model_dir, "prefill", tmp_path / "p")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(RoleRefused) as refused:
        artefact.read(path)
    assert (refused.value.reason, refused.value.field) == ("BAD_MANIFEST", field)


@pytest.mark.parametrize("text", ["", "no json", "[]", "\xff"])
def test_a_file_that_is_not_a_manifest_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RoleRefused, match=r"manifest\.json"):
        artefact.read(path)
    with pytest.raises(RoleRefused, match="No such file"):
        artefact.read(tmp_path / "away.json")


def test_one_copy_serves_both_roles_and_a_damaged_source_is_not_copied(
    model_dir: Path, tmp_path: Path
) -> None:
    p = artefact.read(artefact.build(model_dir, "prefill", tmp_path / "p"))
    d = artefact.read(artefact.build(model_dir, "decode", tmp_path / "d"))
    cache = tmp_path / "cache"
    copied = artefact.fetch(p, cache)
    artefact.verify(copied)
    assert artefact.fetch(d, cache).folder == copied.folder
    assert [x.name for x in cache.iterdir()] == [copied.folder.name]
    _remove(d.folder)
    with pytest.raises(RoleRefused) as refused:
        artefact.fetch(d, tmp_path / "other")
    assert refused.value.reason == "FETCH_FAILED"
    assert not list((tmp_path / "other").iterdir())


def cached_settings(cache: Path) -> Settings:
    return Settings(instance_id="i-0", nats_url="nats://here:1", model_cache_dir=cache)


@pytest.mark.parametrize("damage", [_cut, _change, _remove])
async def test_a_damaged_copy_in_the_cache_is_fetched_once_more(
    damage: Callable[[Path], None], model_dir: Path, tmp_path: Path
) -> None:
    """After a power cut, a half-written copy has the name of a whole one. Without a check, every
    later load would fail on it.
    """
    path = artefact.build(model_dir, "prefill", tmp_path / "p")
    copy = artefact.fetch(artefact.read(path), tmp_path / "cache")
    damage(copy.folder)
    role_spec = RoleSpec(Role.PREFILL, "g", "s", manifest=str(path))
    found, verified = await with_artefact(
        cached_settings(tmp_path / "cache"), role_spec, PartTimes()
    )
    assert found.model_dir == copy.folder
    assert verified == copy
    artefact.verify(copy)
    folders = [x.name for x in (tmp_path / "cache").iterdir() if x.is_dir()]
    assert folders == [copy.folder.name], "the damaged copy was deleted"


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_the_engine_gets_the_digests_of_the_files_that_were_verified(
    is_elsewhere: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the role spec names another folder, the artefact's digests do not apply to it."""
    path = artefact.build(model_dir, "prefill", tmp_path / "p")
    asked: list[EngineSettings] = []

    def build(wanted: EngineSettings, _: object) -> None:
        asked.append(wanted)
        raise EngineFailed("not here")

    monkeypatch.setattr(loading, "build_engine", build)
    role_spec = RoleSpec(
        Role.PREFILL, "g", "s", manifest=str(path), model_dir=str(model_dir) * is_elsewhere
    )
    with pytest.raises(EngineFailed, match="not here"):
        await loading.load(cached_settings(tmp_path / "cache"), role_spec, 1)
    files = artefact.read(path).manifest.files
    expected = {} if is_elsewhere else {entry.path: entry.sha256 for entry in files}
    assert asked[0].file_digests == expected


async def test_a_corrupt_source_is_refused_even_if_copies_are_kept(
    model_dir: Path, tmp_path: Path
) -> None:
    path = artefact.build(model_dir, "prefill", tmp_path / "p")
    _change(path.parent / "files")
    role_spec = RoleSpec(Role.PREFILL, "g", "s", manifest=str(path))
    with pytest.raises(RoleRefused) as refused:
        await with_artefact(cached_settings(tmp_path / "cache"), role_spec, PartTimes())
    assert refused.value.reason == "WRONG_HASH"


def test_a_copy_that_another_process_has_repaired_stays(model_dir: Path, tmp_path: Path) -> None:
    source = artefact.read(artefact.build(model_dir, "prefill", tmp_path / "p"))
    copy = artefact.fetch(source, tmp_path / "cache")
    before = copy.folder.stat().st_ino
    assert artefact.fetch_again(source, tmp_path / "cache").folder.stat().st_ino == before


def test_the_command_builds_and_verifies(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["artefact", *arguments])
        return int(left.value.code or 0)

    out = str(tmp_path / "p")
    build = ("build", str(model_dir), "--role", "prefill", "--out", out)
    assert run(*build, "--set", "dtype=float32", "--name", "m") == 0
    manifest = capsys.readouterr().out.strip()
    assert run("verify", manifest) == 0
    assert "m for prefill" in capsys.readouterr().out
    assert run(*build) == 1
    assert "exists already" in capsys.readouterr().err
    _change(Path(out) / "files")
    assert run("verify", manifest) == 1
    assert "WRONG_HASH" in capsys.readouterr().err
    assert (
        run("build", str(model_dir), "--role", "decode", "--out", f"{out}2", "--set", "host=x") == 1
    )
    assert "BAD_OPTION" in capsys.readouterr().err


def test_an_assignment_says_how_a_model_is_loaded_and_nothing_else() -> None:
    role_spec = RoleSpec(Role.DECODE, "g", "s", model="m", options=(("block_size", "32"),))
    settings = Settings(instance_id="i-0", nats_url="nats://here:1")
    done = settings_for(settings, role_spec, {"block_size": "16", "dtype": "float32"})
    assert (done.block_size, done.dtype, done.model) == (32, "float32", "m")
    assert (done.group_id, done.scenario, done.num_slots) == ("g", "s", 64)
    assert (done.instance_id, done.nats_url) == ("i-0", "nats://here:1")
    for options, field in (
        ((("nats_url", "nats://away"),), "nats_url"),
        ((("block_size", "no number"),), "block_size"),
        ((("block_size", "0"),), "block_size"),
    ):
        with pytest.raises(RoleRefused) as refused:
            settings_for(settings, RoleSpec(Role.DECODE, "g", "s", options=options), {})
        assert (refused.value.reason, refused.value.field) == ("BAD_OPTION", field)
    with pytest.raises(RoleRefused):
        settings_for(settings, RoleSpec(Role.NONE, "g", "s"), {})
