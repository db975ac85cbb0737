"""Identifies the model in a folder by a digest of all files that decide the contents of KV.

Two checkpoints may differ only in one projection of one layer, so the digest covers all bytes. If
two models had equal digests, one model's KV would be used for the other, both between instances and
from the tiers, which keep KV outside vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from pdmesh.engine.vllm.model.file_digests import (
    FileDigest,
    FileDigests,
    Stamp,
    changed,
)
from pdmesh.engine.vllm.model.fingerprint import digest
from pdmesh.errors import EngineFailed

CONFIG: Final = "config.json"
_REMEDY: Final = "prepare it with `make model`, or name a local Hugging Face directory with --model"
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})
# JSON files that do not change how KV is computed: tokenizers, settings for drawing, and our own
# notes about a download. Files about how to read an image do change KV, so they are not listed.
_OF_TEXT: Final = (
    "tokenizer", "special_tokens", "added_tokens", "vocab", "chat_template", "generation_config",
    "pdmesh-manifest",
)  # fmt: skip


def decides_kv(name: str) -> bool:
    """Whether a file has weights, or says how they are arranged, quantised and used.

    An unknown JSON file is taken to decide KV.
    """
    suffix = PurePath(name).suffix
    if name.startswith("."):
        return False
    return suffix in WEIGHTS or (suffix == ".json" and not name.startswith(_OF_TEXT))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path
    config: str  # the content of config.json, independent of its formatting
    files: Mapping[str, FileDigest]  # all but config.json

    @property
    def digest(self) -> str:
        names = sorted(self.files)
        return digest([self.config, *(f"{name}:{self.files[name].sha256}" for name in names)])

    def check_unchanged(self, digests: FileDigests) -> None:
        """Check that the loaded files are the files that were hashed. Blocks.

        Raises EngineFailed with the reason MODEL_CHANGED.
        """
        try:
            names = _names(self.folder)
            stamps = {name: Stamp.of((self.folder / name).stat()) for name in names}
            touched = [n for n, s in stamps.items() if n in self.files and s != self.files[n].stamp]
            again = digests.of(self.folder, touched) if touched else {}
            config = _config(self.folder)
        except (OSError, ValueError) as error:
            raise changed(self.folder) from error
        if set(names) != set(self.files) or config != self.config:
            raise changed(self.folder)
        for name, found in again.items():
            if found.sha256 != self.files[name].sha256:
                raise changed(self.folder / name)


def read_model(
    folder: Path,
    digests: FileDigests,
    known: Mapping[str, str] | None = None,
    remedy: str = _REMEDY,
) -> ModelFiles:
    """Identify the model in a folder. Blocks while it hashes the files.

    `known` has the SHA-256 of files that were verified a moment ago. These files are not hashed
    again. `remedy` is the advice in the error if there is no model. Raises EngineFailed if the
    folder does not hold a Hugging Face model.
    """
    known = known or {}
    try:
        config, names = _config(folder), _names(folder)
        files = {
            name: FileDigest(Stamp.of((folder / name).stat()), known[name])
            for name in names
            if name in known
        }
        files |= digests.of(folder, [name for name in names if name not in files])
    except (OSError, ValueError) as error:
        raise EngineFailed(
            f"no model in {folder}: {error.__class__.__name__} at {CONFIG} or a weight file; "
            f"{remedy}",
            reason="MODEL_MISSING",
        ) from error
    if not any(PurePath(name).suffix in WEIGHTS for name in files):
        raise EngineFailed(f"no weights in {folder}", reason="MODEL_MISSING")
    return ModelFiles(folder, config, files)


def _config(folder: Path) -> str:
    return json.dumps(json.loads((folder / CONFIG).read_bytes()), sort_keys=True)


def _names(folder: Path) -> list[str]:
    """The files that decide KV, besides config.json. vLLM reads no folders below this one."""
    found = (p.name for p in folder.iterdir() if decides_kv(p.name) and p.is_file())
    return sorted(name for name in found if name != CONFIG)
