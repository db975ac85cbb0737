"""The environment of an instance to which the master may assign a role."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdmesh.config import settings_config
from pdmesh.instance.settings import InstanceSettings


class Settings(InstanceSettings):
    model_config = settings_config("PDMESH_INSTANCE_")

    role: Literal["none", "prefill", "decode", "fusion", "pooling", "encoder"] = Field(
        "none", description="Role at start; none: blank, until the master assigns one"
    )
    num_slots: int = Field(
        0,
        ge=0,
        description="Requests served at once; 0: 64 for a decode, 16 batches of inputs for "
        "pooling, 8 otherwise",
    )
