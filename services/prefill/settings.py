"""The environment of a prefill instance."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdmesh.config import settings_config
from pdmesh.instance.settings import InstanceSettings


class Settings(InstanceSettings):
    model_config = settings_config("PDMESH_PREFILL_")

    role: Literal["prefill", "fusion"] = Field(
        "prefill", description="prefill, or fusion for both phases on this instance"
    )
