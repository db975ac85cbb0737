"""Writes the bill of materials of an operator's installation, as CycloneDX JSON.

It lists each package with its version, hashes and licence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.audit.pinned import Pin, normalized


def write_sbom(target: Path, pins: Iterable[Pin], licences: Mapping[Pin, str], root: Path) -> None:
    """Write the bill of materials to `target`.

    Raises ValueError if the result is not valid CycloneDX, and CalledProcessError if cyclonedx_py
    fails.
    """
    by_key = {(pin.name, pin.version): licences.get(pin, "") for pin in pins}
    wanted = target.with_suffix(".txt")
    wanted.write_text("\n".join(pin.requirement() for pin in pins) + "\n")
    _cyclonedx("requirements", str(wanted), "--pyproject", str(root / "pyproject.toml"),
        "--output-reproducible", "--no-validate", "-o", str(target))  # fmt: skip
    wanted.unlink()
    document: dict[str, Any] = json.loads(target.read_text())
    for component in document["components"]:
        key = normalized(component["name"]), component["version"]
        if expression := by_key.get(key):
            component["licenses"] = [{"expression": expression}]
    target.write_text(json.dumps(document, indent=1) + "\n")
    if errors := _errors(target):
        raise ValueError(f"{target}: {errors}")


def _cyclonedx(*arguments: str) -> None:
    command = [sys.executable, "-m", "cyclonedx_py", *arguments]
    subprocess.run(command, capture_output=True, check=True)


def _errors(target: Path) -> str:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    document = target.read_text()
    version = SchemaVersion.from_version(json.loads(document)["specVersion"])
    found = JsonStrictValidator(version).validate_str(document)
    return "" if found is None else str(found)
