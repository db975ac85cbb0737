"""The environment of a health-monitor, and of a node's agent."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from pdmesh.config import ServiceSettings, node_status_file, settings_config, shared


class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_HEALTH_MONITOR_")

    forget_s: float = Field(
        60.0, gt=0, description="How long to keep the verdict on an instance that is gone"
    )
    canary_period_s: float = Field(
        30.0, gt=0, description="Interval of canary probes on an idle instance"
    )


class NodeSettings(ServiceSettings):
    """The settings of `pdmesh-health-monitor --node`."""

    model_config = settings_config("PDMESH_NODE_AGENT_")

    period_s: float = Field(
        2.0, gt=0, description="Interval at which devices are read and reported"
    )
    device_dir: Path | None = Field(
        None,
        description="Folder with one file per device, written by tools; default: STATE_DIR/devices",
    )
    node_status_file: Path | None = shared(
        None,
        description="File with the node's status for its instances; default: "
        "STATE_DIR/run/node-status.json",
    )

    @property
    def device_files(self) -> Path:
        return self.device_dir or self.state_dir / "devices"

    @property
    def status_file(self) -> Path:
        return self.node_status_file or node_status_file(self.state_dir)
