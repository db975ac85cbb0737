"""Runs a real Envoy with deploy/envoy/endpoint-picker.yaml, in which addresses are replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from pdmesh.embedded.ports import PortReservation
from tests.support.waiting import until

CONFIG: Final = Path(__file__).parents[3] / "deploy/envoy/endpoint-picker.yaml"
_ENVOY: Final = Path(sys.executable).with_name("envoy")
Config = dict[str, Any]  # parsed YAML


def picker_config(port: int, gateways: Sequence[str], pickers: Sequence[str]) -> Config:
    """The deployed configuration with these addresses. Envoy listens on `port`."""
    config: Config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]
    resources["listeners"][0]["address"] = _socket(f"127.0.0.1:{port}")
    for cluster, addresses in zip(resources["clusters"], (gateways, pickers), strict=True):
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": _socket(a)}} for a in addresses]}
        ]
    return config


def ext_proc(config: Config) -> Config:
    """The settings of the `ext_proc` filter, which asks the pickers."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    named = {f["name"]: f for f in manager["typed_config"]["http_filters"]}
    found: Config = named["envoy.filters.http.ext_proc"]["typed_config"]
    return found


def manager_of(config: Config) -> Config:
    """The settings of the HTTP connection manager."""
    chain = config["static_resources"]["listeners"][0]["filter_chains"][0]
    found: Config = chain["filters"][0]["typed_config"]
    return found


def cluster_of(config: Config, name: str) -> Config:
    clusters: list[Config] = config["static_resources"]["clusters"]
    (found,) = (c for c in clusters if c["name"] == name)
    return found


def _socket(address: str) -> Config:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


class Envoy:
    """An Envoy process that runs until the end of the block."""

    def __init__(self, folder: Path, config: Config, port: PortReservation) -> None:
        self._port, self._admin = port, PortReservation("127.0.0.1", 0)
        self._log = folder / "envoy.log"
        file = folder / "envoy.yaml"
        admin = {"admin": {"address": _socket(f"127.0.0.1:{self._admin.port}")}}
        file.write_text(yaml.safe_dump(config | admin))
        command = [str(_ENVOY), "-c", str(file), "--concurrency", "1", "--disable-hot-restart"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.port}"

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port.port

    def log(self) -> str:
        return self._log.read_text()

    async def __aenter__(self) -> Self:
        async def is_up() -> bool:
            assert self._process.poll() is None, self.log()
            try:
                return "LIVE" in await self._asked("/ready")
            except httpx.TransportError:
                return False

        try:
            await until(is_up)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._port.close()
        self._admin.close()

    async def counter(self, name: str) -> int:
        """The value of the counter or gauge whose name ends in `name`. Several matches are added
        up.
        """
        text = await self._asked("/stats")
        lines = rf"(?m)^\S*{re.escape(name)}: (\d+)$"
        return sum(int(number) for number in re.findall(lines, text))

    async def _asked(self, path: str) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            return (await client.get(f"http://127.0.0.1:{self._admin.port}{path}")).text
