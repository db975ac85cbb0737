"""The environment of a health-monitor."""

from __future__ import annotations

from pydantic import Field

from pdmesh.config import ServiceSettings, settings_config


class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_HEALTH_MONITOR_")

    forget_s: float = Field(
        60.0, gt=0, description="Keep the verdict on an instance that is gone for so long"
    )
