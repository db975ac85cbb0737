"""The environment of a decode instance."""

from __future__ import annotations

from pydantic import Field

from pdmesh.config import settings_config
from pdmesh.instance.settings import InstanceSettings


class Settings(InstanceSettings):
    model_config = settings_config("PDMESH_DECODE_")

    num_slots: int = Field(64, ge=1, description="Sequences decoded at once (b_d)")
