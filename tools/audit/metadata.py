"""Finds the metadata of pinned packages.

It looks in the given environments and in the file of pip's earlier answers, and asks pip for the
rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from tools.audit.licences import Metadata
from tools.audit.pinned import Pin, normalized, public, without_namesakes

_Key = tuple[str, str]  # name and public version


def metadata_of(
    pins: Iterable[Pin], environments: Iterable[Path], kept: Path
) -> dict[Pin, Metadata]:
    """The metadata of each package that can be found. `kept` is the file of pip's earlier
    answers.
    """
    here = _installed(environments) | _read(kept)
    missing = [pin for pin in pins if _key(pin) not in here]
    asked: dict[_Key, Metadata] = {}
    for each in without_namesakes(missing):
        asked |= _ask_pip(each, kept.parent)
    if asked:
        _write(kept, _read(kept) | asked)
    here |= asked
    return {pin: here[_key(pin)] for pin in pins if _key(pin) in here}


def _key(pin: Pin) -> _Key:
    """The key of a package's metadata, without the build.

    Builds of one version, such as torch's for CPUs and for CUDA, have one licence.
    """
    return pin.name, pin.public_version


def _installed(environments: Iterable[Path]) -> dict[_Key, Metadata]:
    folders = [str(f) for venv in environments for f in venv.glob("lib/python3*/site-packages")]
    return {
        (normalized(each.name), public(each.version)): _metadata(each)
        for each in distributions(path=folders)
    }


def _metadata(found: Distribution) -> Metadata:
    about = found.metadata
    classifiers = [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    return Metadata(
        _one(about.get_all("License-Expression")),
        _one(about.get_all("License")),
        tuple(classifiers),
    )


def _one(values: list[str] | None) -> str:
    return values[0] if values else ""


def _ask_pip(pins: Iterable[Pin], folder: Path) -> dict[_Key, Metadata]:
    """The metadata that pip resolves; empty if one of the packages is not available.

    pip gets no hashes. With hashes, pip would download each wheel to compare them, and the wheels
    for CUDA have gigabytes. pip installs nothing and reads only wheels, so no code of a package
    runs.
    """
    wanted, report = folder / "wanted.txt", folder / "report.json"
    wanted.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins))
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:",
        "--report", str(report), "-r", str(wanted),
    ]  # fmt: skip
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return {}
    return dict(_reported(each["metadata"]) for each in json.loads(report.read_text())["install"])


def _reported(about: Mapping[str, Any]) -> tuple[_Key, Metadata]:
    classifiers = [c for c in about.get("classifier", ()) if c.startswith("License ::")]
    found = Metadata(
        about.get("license_expression", ""), about.get("license", ""), tuple(classifiers)
    )
    return (normalized(about["name"]), public(about["version"])), found


def _read(kept: Path) -> dict[_Key, Metadata]:
    if not kept.exists():
        return {}
    return {
        (name, public(version)): Metadata(
            said["expression"], said["licence"], tuple(said["classifiers"])
        )
        for name, version, said in json.loads(kept.read_text())
    }


def _write(kept: Path, found: Mapping[tuple[str, str], Metadata]) -> None:
    rows = [(name, version, asdict(said)) for (name, version), said in sorted(found.items())]
    kept.write_text(json.dumps(rows, indent=1))
