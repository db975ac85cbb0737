"""Runs the tools of `make audit`.

pip-audit asks a vulnerability database, which this test imitates. detect-secrets searches a
repository with a planted key. The bill of materials must be valid. The tests run nightly, after
`make audit` has installed the tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".cache/audit/venv/bin/python"
FLAW: Final = {
    "vulns": [
        {
            "id": "GHSA-test", "aliases": ["CVE-2000-1"], "summary": "It pads\nto the right.",
            "affected": [
                {
                    "package": {"name": "left-pad", "ecosystem": "PyPI"},
                    "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "1.1"}]}],
                }
            ],
        }
    ]
}  # fmt: skip

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="make audit installs the tools"),
]


@contextmanager
def database(asked: list[dict[str, Any]]) -> Iterator[str]:
    """Serve the API of OSV, the vulnerability database, with one known vulnerability."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(query)
            is_flawed = query["package"]["name"] == "left-pad"
            body = json.dumps(FLAW if is_flawed else {}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_PROXY": "*", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK: Final = """
import sys
from pathlib import Path
from tools.audit.pinned import Pin
from tools.audit.vulnerabilities import DatabaseUnreachable, vulnerabilities_of
pins = [Pin("left-pad", "1.0+cpu", ()), Pin("left-pad", "2.0", ()), Pin("other", "3", ())]
try:
    print(*vulnerabilities_of(pins, Path(sys.argv[1]), sys.argv[2]), sep="\\n")
except DatabaseUnreachable as exc:
    print("unreachable", exc)
"""


def test_every_pin_is_asked_for_and_a_vulnerability_is_named(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    with database(asked) as url:
        lines = run(ASK, str(tmp_path), url).splitlines()
    versions = sorted((each["package"]["name"], each["version"]) for each in asked)
    assert versions == [("left-pad", "1.0"), ("left-pad", "2.0"), ("other", "3")]
    what = "(fixed in 1.1): It pads to the right."
    assert lines == [
        f"vulnerabilities: left-pad {version}: CVE-2000-1 GHSA-test {what}"
        for version in ("1.0", "2.0")
    ]


def test_without_the_database_one_line_says_so(tmp_path: Path) -> None:
    with database([]) as url:
        pass
    (line,) = run(ASK, str(tmp_path), url).splitlines()
    assert line.startswith(f"unreachable {url} gives no answer")


def test_a_planted_key_is_found_where_git_knows_the_file(tmp_path: Path) -> None:
    (tmp_path / "known.py").write_text('KEY = "AKIA' + 'IOSFODNN7EXAMPLX"\n')
    (tmp_path / "unknown.py").write_text('KEY = "AKIA' + 'IOSFODNN7EXAMPLX"\n')
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "known.py"], cwd=tmp_path, check=True)
    code = (
        "import sys; from pathlib import Path; from tools.audit.secrets import suspects\n"
        "print(*suspects(Path(sys.argv[1])), sep='\\n')"
    )
    found = run(code, str(tmp_path)).splitlines()
    assert "secrets: known.py:1: AWS Access Key" in found
    assert not any("unknown.py" in line for line in found)


def test_the_bill_of_materials_has_versions_hashes_and_licences(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools.audit import pinned, sbom\n"
        "pins = [p for p in pinned.pins_in([Path('requirements/base.txt')]) if p.name == 'redis']\n"
        "sbom.write_sbom(Path(sys.argv[1]), pins, {pins[0]: 'MIT'}, Path('.'))"
    )
    target = tmp_path / "sbom.json"
    run(code, str(target))
    document = json.loads(target.read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "pdmesh"
    (redis,) = document["components"]
    assert redis["licenses"] == [{"expression": "MIT"}]
    assert f"redis=={redis['version']} \\" in (ROOT / "requirements/base.txt").read_text()
    assert "sha256" in json.dumps(redis).lower()
    assert redis["purl"].startswith("pkg:pypi/redis@")
