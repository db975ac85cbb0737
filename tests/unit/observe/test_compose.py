"""The profile `observe` of docker-compose.yml fits the cluster that it watches.

Its services are as hardened as those of the cluster.

No test starts the images, so these tests compare the files with each other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tools.observe.__main__ import FOLDER

ROOT = Path(__file__).parents[3]
OBSERVE = ROOT / "deploy/observe"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WATCHING = {n: s for n, s in COMPOSE["services"].items() if s.get("profiles") == ["observe"]}
WATCHED = {n: s for n, s in COMPOSE["services"].items() if "profiles" not in s}


def read(name: str) -> Any:
    return yaml.safe_load((OBSERVE / name).read_text())


def test_prometheus_scrapes_every_process_of_the_cluster() -> None:
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    (targets,) = job["static_configs"]
    ours = {name for name, s in WATCHED.items() if s["image"].startswith("pdmesh:")}
    assert job["job_name"] == "pdmesh"
    assert set(targets["targets"]) == {f"{name}:9100" for name in ours}


def test_prometheus_finds_the_processes_of_other_profiles_by_name_while_they_run() -> None:
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    profiles = (["blank"], ["standby"], ["node-agent"])
    ours = {n for n, s in COMPOSE["services"].items() if s.get("profiles") in profiles}
    assert len(ours) == len(found["names"])
    assert set(found["names"]) == ours
    assert found["port"] == 9100
    (label,) = [r for r in job["relabel_configs"] if r["source_labels"] == ["__meta_dns_name"]]
    assert label["target_label"] == "instance"


def test_what_watches_is_as_hardened_as_what_is_watched() -> None:
    assert set(WATCHING) == {"prometheus", "grafana", "collector", "jaeger"}
    for name, service in WATCHING.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert not service["user"].startswith("0"), name
        assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w./-]+:v?\d+\.\d+\.\d+\}", service["image"]), name


def test_only_grafana_is_published_and_it_is_not_on_the_mesh() -> None:
    published = {name: s["ports"] for name, s in WATCHING.items() if "ports" in s}
    assert list(published) == ["grafana"]
    assert all(port.startswith("127.0.0.1:") for port in published["grafana"])
    networks = {name: set(s["networks"]) for name, s in WATCHING.items()}
    assert "mesh" not in networks["grafana"] | networks["jaeger"]
    assert [name for name, on in networks.items() if "edge" in on] == ["grafana"]
    assert COMPOSE["networks"]["observe"]["internal"]


def test_each_file_that_a_container_reads_is_there_and_is_where_it_looks() -> None:
    for name, service in WATCHING.items():
        for config in service.get("configs", ()):
            file = ROOT / COMPOSE["configs"][config["source"]]["file"]
            assert file.is_file(), name
    binds = [v.split(":") for v in WATCHING["grafana"]["volumes"] if v.startswith("./")]
    inside = {target: ROOT / source for source, target, _ in binds}
    assert inside["/etc/dashboards"] == ROOT / FOLDER
    (provider,) = read("grafana/provisioning/dashboards/pdmesh.yaml")["providers"]
    assert provider["options"]["path"] in inside
    home = WATCHING["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((ROOT / FOLDER / Path(home).name).read_text())["uid"] == "pdmesh-overview"


def test_every_address_that_a_file_names_is_a_service_of_a_shared_network() -> None:
    sources = read("grafana/provisioning/datasources/pdmesh.yaml")["datasources"]
    collector = read("collector.yaml")
    asked = {("grafana", source["url"].split("/")[2]) for source in sources}
    asked.add(("collector", collector["exporters"]["otlp"]["endpoint"]))
    for asking, address in asked:
        host = address.split(":")[0]
        assert set(WATCHING[asking]["networks"]) & set(WATCHING[host]["networks"]), address
    receiver = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert "mesh" in WATCHING["collector"]["networks"]
    for page in ("docs/observe.md", "docs/docker.md", "docker-compose.yml"):
        assert f"http://collector:{receiver.split(':')[1]}" in (ROOT / page).read_text()


def test_the_collector_has_a_pipeline_for_all_that_the_mesh_sends() -> None:
    """An OTLP receiver refuses a signal for which there is no pipeline. Each process of the mesh
    would then log an error.
    """
    collector = read("collector.yaml")
    pipelines = collector["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics"}
    for kind in ("receivers", "processors", "exporters"):
        used = {each for pipeline in pipelines.values() for each in pipeline.get(kind, ())}
        assert used == set(collector[kind])
