"""The stored record of an upgrade contains everything that the next leader needs."""

from __future__ import annotations

from dataclasses import fields

from pdmesh.core.groups.desired import Service
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.model import Role
from pdmesh.services.master_scheduler.groups.upgrade_convert import upgrades_from, upgrades_to

FULL = Service(
    model="m",
    model_dir="/m",
    manifests={Role.DECODE: "/m/decode.json"},
    options={"num_slots": "4"},
    role_options={Role.DECODE: {"num_slots": "8"}},
    release="2",
    dp_size={Role.DECODE: 8},
)


def test_each_field_of_a_service_survives_being_stored() -> None:
    empty = Service()
    same = [f.name for f in fields(Service) if getattr(FULL, f.name) == getattr(empty, f.name)]
    assert same == [], "a field that FULL leaves out is not tested"
    known = {
        "default": Upgrade(
            "default", settled=empty, settled_version=1, target=FULL, version=2,
            changed={"chat": FULL},
        )
    }  # fmt: skip
    assert upgrades_from(upgrades_to(known, 1)) == known
