"""`make audit` runs `python -m tools.audit FOLDER RUFF VENV...`.

The bills of materials are written to FOLDER. Each VENV is an environment with installed packages.
The variable PDMESH_AUDIT_OSV_URL may name another vulnerability database. Findings make the audit
fail, and so does a malformed audit.yaml. A check that cannot reach the network does not fail. It
only prints a line about it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tools.audit import insecure_code, licences, secrets, vulnerabilities
from tools.audit.accepted import Accepted, BadAuditFile, read
from tools.audit.metadata import metadata_of
from tools.audit.pinned import Pin, pins_in
from tools.audit.sbom import write_sbom

_ROOT: Final = Path(__file__).parents[2]
_REQUIREMENTS: Final = _ROOT / "requirements"
# The packages that an operator installs: for a mesh on the simulated engine, on vLLM, or on vLLM
# with CUDA GPUs.
_SETS: Final = {
    "sim": ("base",),
    "vllm": ("base", "vllm", "torch", "model"),
    "vllm-cuda": ("base", "vllm-cuda", "model"),
}


def main(folder: Path, ruff: Path, environments: Iterable[Path]) -> int:
    try:
        accepted = read(_REQUIREMENTS / "audit.yaml")
    except BadAuditFile as exc:
        print(f"audit: {exc}", file=sys.stderr)
        return 1
    pins = pins_in(sorted(_REQUIREMENTS.glob("*.txt")))
    findings: list[str] = []
    findings += _licences(pins, accepted, folder, environments)
    findings += _vulnerabilities(pins, accepted, folder)
    findings += _step("code", lambda: insecure_code.found_by_ruff(ruff, _ROOT))
    findings += _step("exceptions in code", lambda: insecure_code.silent_exceptions(_ROOT))
    suspects = secrets.suspects(_ROOT)
    findings += _step("secrets", lambda: secrets.unexplained(suspects, accepted.secrets))
    for each in findings:
        print(each, file=sys.stderr)
    return int(bool(findings))


def _step(name: str, check: Callable[[], Iterable[str]]) -> list[str]:
    found = list(check())
    print(f"audit: {name}: {len(found) or 'no'} findings")
    return found


def _licences(
    pins: list[Pin], accepted: Accepted, folder: Path, environments: Iterable[Path]
) -> list[str]:
    known = metadata_of(pins, environments, folder / "metadata.json")
    expressions = {
        pin: licences.expression_of(pin, metadata, accepted.licences)
        for pin, metadata in known.items()
    }
    if missing := [str(pin) for pin in pins if pin not in known]:
        print(
            f"audit: licences: NOT CHECKED for {len(missing)} packages that neither are installed "
            f"here nor come from the package index: {', '.join(missing)}"
        )
    for name, files in _SETS.items():
        chosen = pins_in(_REQUIREMENTS / f"{file}.txt" for file in files)
        target = folder / f"pdmesh-{name}.cdx.json"
        write_sbom(target, chosen, expressions, _ROOT)
        print(f"audit: bill of materials: {target}, {len(chosen)} packages")
    return _step(
        f"licences of {len(known)} packages",
        lambda: licences.forbidden(expressions, accepted.licences, is_whole=not missing),
    )


def _vulnerabilities(pins: list[Pin], accepted: Accepted, folder: Path) -> list[str]:
    url = os.environ.get("PDMESH_AUDIT_OSV_URL", vulnerabilities.OSV_URL)
    try:
        found = vulnerabilities.vulnerabilities_of(pins, folder, url)
    except vulnerabilities.DatabaseUnreachable as exc:
        print(f"audit: vulnerabilities: NOT CHECKED, which needs the network: {exc}")
        return []
    today = datetime.now(UTC).date()
    return _step(
        f"vulnerabilities of {len(pins)} packages",
        lambda: vulnerabilities.unaccepted(found, accepted.vulnerabilities, today),
    )


if __name__ == "__main__":
    folder, ruff, *environments = map(Path, sys.argv[1:])
    sys.exit(main(folder, ruff, environments))
