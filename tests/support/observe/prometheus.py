"""Finds Prometheus' programs on this machine, and runs a Prometheus server for a test."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

_ROOT: Final = Path(__file__).parents[3]
_UNPACKED: Final = _ROOT / ".cache/prometheus/usr/bin"
_START_S: Final = 60.0
SCRAPE_S: Final = 2


def program(name: str) -> Path:
    """The path of prometheus or promtool. Skips the test if the program is not installed.

    .ci/nightly installs both.
    """
    for found in (shutil.which(name), shutil.which(name, path=_UNPACKED)):
        if found is not None:
            return Path(found)
    pytest.skip(f"{name} is not installed: apt install prometheus, or run .ci/prometheus")


class PrometheusServer:
    """A client of Prometheus' HTTP API."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)

    def query(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The labels and the current value of each series."""
        found = self._get("query", query=query)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def series(self, matcher: str) -> list[Mapping[str, str]]:
        """The labels of every series so far that `matcher` selects."""
        found: list[Mapping[str, str]] = self._get("series", **{"match[]": matcher})
        return found

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return found

    def _get(self, page: str, **params: str) -> Any:
        answer = self._client.get(f"/api/v1/{page}", params=params)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()["data"]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()


@contextmanager
def scraping(targets: Mapping[str, str], folder: Path, port: int) -> Iterator[PrometheusServer]:
    """Run a server that scrapes `targets` and evaluates the rules of deploy/observe.

    `targets` has an address for each value of the label `instance`.
    """
    (folder / "targets.json").write_text(
        json.dumps(
            [{"targets": [at], "labels": {"instance": name}} for name, at in targets.items()]
        )
    )
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    job = {"job_name": "pdmesh", "file_sd_configs": [{"files": [str(folder / "targets.json")]}]}
    rules = str(_ROOT / "deploy/observe/prometheus/rules.yml")
    config = {"global": every, "rule_files": [rules], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        str(program("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = PrometheusServer(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _START_S
        while not server.is_ready():
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus does not answer"
            time.sleep(0.1)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(30)
