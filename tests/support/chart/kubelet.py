"""Starts the Helm chart's pods as processes on this machine, as a kubelet starts them in
containers.

A container's command runs with exactly the environment of its image and its manifest. Two things
replace the container. Each pod has its own loopback address, which replaces 0.0.0.0, 127.0.0.1 and
the names of Services. Each mount is a folder, and paths below the mount become paths in the folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.embedded.binaries import NATS, VALKEY, find
from pdmesh.net.tls.authority import Authority
from tests.support.chart.helm import ROOT, Manifest, of_kind

# a name of the form that cloud providers give to machines
NODE: Final = "ip-10-0-0-1.example.internal"
ANY_ADDRESS: Final = "0.0.0.0"
_SHARED_MEMORY: Final = "/dev/shm"  # this mount is left out, because the machine has the folder
_START_S: Final = 240
_BASE_PATH: Final = "/usr/bin:/bin"


def image_environment() -> dict[str, str]:
    """The variables that the Dockerfile sets in every image, and those for the simulated engine."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    environment: dict[str, str] = {}
    for stage in ("runtime", "runtime-sim"):
        part = text.partition(f"AS {stage}\n")[2].partition("\nFROM ")[0]
        (line,) = re.findall(r"^ENV (.*)$", part, re.MULTILINE)
        environment |= dict(pair.partition("=")[::2] for pair in line.split())
    return environment


@dataclass
class Pod:
    """One container of a pod, which runs as a process."""

    name: str
    ip: str
    labels: dict[str, str]
    container: Manifest
    mounts: dict[str, Path]  # folders by mount path
    environment: dict[str, str]
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.mounts.get("/tmp"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    async def end(self) -> int:
        """Send SIGTERM, as Kubernetes does at the end of a pod, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, _START_S)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def probe(self, kind: str, client: httpx.AsyncClient) -> bool:
        """Whether the probe `kind` of the container (for example `readinessProbe`) succeeds."""
        asked = self.container[kind]["httpGet"]
        (port,) = (
            p["containerPort"] for p in self.container["ports"] if p["name"] == asked["port"]
        )
        try:
            answer = await client.get(f"http://{self.ip}:{port}{asked['path']}")
        except httpx.TransportError:
            return False
        return answer.is_success


class Kubelet:
    """One pod for each workload in the manifests, whatever its number of replicas.

    `pods` has the first container of a pod under the pod's name, and a further container under a
    name like `pdmesh-nats/reload`.

    `image` maps paths of the image to folders of this machine. `net` is the beginning of the pods'
    addresses, which must be loopback addresses. The end of the block kills the processes that still
    run.
    """

    def __init__(
        self,
        manifests: list[Manifest],
        folder: Path,
        image: Mapping[str, Path] | None = None,
        net: str = "",
    ) -> None:
        self._folder, self._image = folder, image or {}
        self._volumes: dict[str, dict[str, Manifest]] = {}
        self._texts = {
            m["metadata"]["name"]: m.get("stringData") or m.get("data") or {}
            for m in of_kind(manifests, "Secret", "ConfigMap")
        }
        workloads = of_kind(manifests, "Deployment", "StatefulSet", "DaemonSet", "Job")
        # The addresses depend on the process ID, so test runs on one machine do not disturb each
        # other.
        number = os.getpid()
        net = net or f"127.{number // 250 % 250 + 1}.{number % 250 + 1}"
        ips = dict(zip((w["metadata"]["name"] for w in workloads), _hosts(net), strict=False))
        self._hosts = {
            service["metadata"]["name"]: ips[w["metadata"]["name"]]
            for service in of_kind(manifests, "Service")
            for w in workloads
            if service["spec"]["selector"].items() <= _labels(w).items()
        }
        (folder / "bin").mkdir()
        (folder / "bin/nats-server").symlink_to(find(NATS))
        (folder / "bin/redis-server").symlink_to(find(VALKEY))
        self.pods = {
            _name(w) + (f"/{container['name']}" if number else ""): self._pod(w, container, ip)
            for w in workloads
            for ip in [ips[_name(w)]]
            for number, container in enumerate(w["spec"]["template"]["spec"]["containers"])
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.kill()

    async def start(self) -> None:
        """Start all pods at once, as Kubernetes does, except the Job that applies the desired
        state.
        """
        for pod in self.pods.values():
            if pod.component != "desired-state":
                pod.start()

    async def wait_ready(self, names: list[str]) -> None:
        """Wait until the readiness probe of each container succeeds. Fails if one of them ends."""
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(_START_S):
            for name in names:
                pod = self.pods[name]
                while not await pod.probe("readinessProbe", client):
                    assert not pod.has_ended(), f"{name}\n{pod.log.read_text()[-3000:]}"
                    await asyncio.sleep(0.05)

    def renew(self, name: str, mount_path: str) -> None:
        """Issue a new certificate to a pod, as the csi-driver does before the old one expires."""
        pod = self.pods[name]
        (mount,) = (m for m in pod.container["volumeMounts"] if m["mountPath"] == mount_path)
        self._issue(
            self._volumes[name][mount["name"]]["csi"]["volumeAttributes"],
            pod,
            pod.mounts[mount_path],
        )

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as `kubectl exec` does. Without a command, run the command of the pod."""
        pod = self.pods[name]
        return subprocess.run(
            [*command] or pod.command,
            env=pod.environment,
            cwd=pod.mounts["/tmp"],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )

    def _pod(self, workload: Manifest, container: Manifest, ip: str) -> Pod:
        name = _name(workload)
        template = workload["spec"]["template"]
        volumes = {v["name"]: v for v in template["spec"].get("volumes", [])}
        self._volumes[name] = volumes
        folder = self._folder / name
        mounts = {
            m["mountPath"]: folder / m["name"]
            for m in container["volumeMounts"]
            if m["mountPath"] != _SHARED_MEMORY
        }
        pod = Pod(
            # The pod names of a Deployment or a DaemonSet end in random letters.
            name if workload["kind"] == "StatefulSet" else f"{name}-7d9c5b8f4-x2x7k",
            ip,
            template["metadata"]["labels"],
            container,
            mounts,
            {},
            [],
            folder / f"{container['name']}.log",
        )
        for mount in container["volumeMounts"]:
            if mount["mountPath"] in mounts:
                self._fill(volumes.get(mount["name"], {}), pod, mounts[mount["mountPath"]])
        pod.environment = self._environment(pod)
        pod.command = [self._in_place(each, pod) for each in container["command"]]
        program = _program(pod.command[0], pod.environment["PATH"])
        pod.command = [program, *pod.command[1:]]
        return pod

    def _fill(self, volume: Manifest, pod: Pod, folder: Path) -> None:
        """Write the files of a volume. A volume without certificate, Secret or ConfigMap stays
        empty.
        """
        if folder.exists():
            return  # an earlier container of the pod has filled it
        folder.mkdir(parents=True)
        if "csi" in volume:
            self._issue(volume["csi"]["volumeAttributes"], pod, folder)
        source = (volume.get("configMap") or {}).get("name")
        source = source or (volume.get("secret") or {}).get("secretName")
        for file, text in self._texts.get(source, {}).items():
            (folder / file).write_text(self._in_place(text, pod))

    def _issue(self, attributes: Mapping[str, str], pod: Pod, folder: Path) -> None:
        """Issue a certificate with the names that the pod requests from the csi-driver."""
        asked = {key.partition("/")[2]: value for key, value in attributes.items()}
        identity = ProcessIdentity.from_uri(asked["uri-sans"].replace("${POD_NAME}", pod.name))
        own, *names = asked["dns-names"].replace("${POD_NAME}", pod.name).split(",")
        assert own == identity.dns_name
        assert identity.role_dns_name in names  # NATS recognizes a pod by this name
        reached = [
            self._hosts.get(name, name.replace("${POD_NAMESPACE}", "mesh")) for name in names
        ]
        Authority.opened(self._folder / "authority").issue(identity, folder, reached)

    def _environment(self, pod: Pod) -> dict[str, str]:
        bins = (self._folder / "bin", Path(sys.executable).parent, _BASE_PATH)
        environment = image_environment() | {"PATH": ":".join(map(str, bins))}
        for each in pod.container.get("env", []):
            value = each.get("value")
            if value is None:
                value = self._value_from(each["valueFrom"], pod)
            value = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], value)
            environment[each["name"]] = value
        return {name: self._in_place(value, pod) for name, value in environment.items()}

    def _value_from(self, source: Manifest, pod: Pod) -> str:
        if secret := source.get("secretKeyRef"):
            return str(self._texts[secret["name"]][secret["key"]])
        path = source["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.*)'\]", path):
            return pod.labels.get(label[1], "")
        return {"metadata.name": pod.name, "status.podIP": pod.ip, "spec.nodeName": NODE}[path]

    def _in_place(self, text: str, pod: Pod) -> str:
        """Replace paths by the pod's folders, and names of Services by addresses."""
        if os.fspath(self._folder) in text:  # the text is PATH, whose folders are real ones
            return text
        for host, ip in self._hosts.items():
            text = re.sub(rf"(?<=[@/]){re.escape(host)}(?=:)", ip, text)
        text = text.replace(ANY_ADDRESS, pod.ip).replace("127.0.0.1", pod.ip)
        folders = {**self._image, **pod.mounts}
        paths = "|".join(map(re.escape, sorted(folders, key=len, reverse=True)))
        return re.sub(
            rf"(?<![\w/.])({paths})(?![\w.-])", lambda found: str(folders[found[1]]), text
        )


def _name(workload: Manifest) -> str:
    return str(workload["metadata"]["name"])


def _labels(workload: Manifest) -> dict[str, Any]:
    labels: dict[str, Any] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def _hosts(net: str) -> Iterator[str]:
    return (f"{net}.{number}" for number in itertools.count(1))


def _program(name: str, path: str) -> str:
    found = next((f for part in path.split(":") if (f := Path(part, name)).exists()), None)
    assert found is not None, f"no image has the program {name}"
    return str(found)
