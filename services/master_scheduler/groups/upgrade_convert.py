"""Converts the upgrades of scenarios between protobuf messages and the core's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pdmesh.core.groups.desired import Service
from pdmesh.core.groups.revisions import Upgrade, Upgrades
from pdmesh.core.model import Role
from pdmesh.core.upgrade.events import UpgradeReport
from pdmesh.v1 import admin_service_pb2 as pb

_ROLES = {role.value: role for role in Role}

T = TypeVar("T")


def upgrades_from(message: pb.Upgrades) -> dict[str, Upgrade]:
    return {
        each.scenario: Upgrade(
            scenario=each.scenario,
            settled=_service_from(each.settled),
            settled_version=each.settled_version,
            target=_service_from(each.target),
            version=each.version,
            changed={g.group_id: _service_from(g.service) for g in each.changed},
            current=each.current,
            canary_share=each.canary_share,
            back=each.back,
            outcome=each.outcome,
            is_proved=each.is_proved,
        )
        for each in message.upgrades
    }


def upgrades_to(upgrades: Upgrades, epoch: int) -> pb.Upgrades:
    return pb.Upgrades(
        epoch=epoch,
        upgrades=[
            pb.Upgrade(
                scenario=each.scenario,
                settled=_service_to(each.settled),
                settled_version=each.settled_version,
                target=_service_to(each.target),
                version=each.version,
                changed=[
                    pb.GroupService(group_id=group_id, service=_service_to(service))
                    for group_id, service in sorted(each.changed.items())
                ],
                current=each.current,
                canary_share=each.canary_share,
                back=each.back,
                outcome=each.outcome,
                is_proved=each.is_proved,
            )
            for _, each in sorted(upgrades.items())
        ],
    )


def state_to(report: UpgradeReport) -> pb.UpgradeState:
    return pb.UpgradeState(
        scenario=report.scenario,
        version=report.version,
        state=report.state,
        detail=report.detail,
        num_changed=report.num_changed,
        num_groups=report.num_groups,
    )


def _service_from(message: pb.ServiceSettings) -> Service:
    """Convert a service's settings. Roles that this release does not know are left out."""
    options = {role: dict(each.values) for role, each in message.role_options.items()}
    return Service(
        model=message.model,
        model_dir=message.model_dir,
        manifests=_by_role(message.manifests),
        options=dict(message.options),
        role_options={_ROLES[role]: each for role, each in options.items() if role in _ROLES},
        release=message.release,
        dp_size=_by_role(message.dp_size),
    )


def _by_role(named: Mapping[str, T]) -> dict[Role, T]:
    return {_ROLES[role]: value for role, value in named.items() if role in _ROLES}


def _service_to(service: Service) -> pb.ServiceSettings:
    return pb.ServiceSettings(
        model=service.model,
        model_dir=service.model_dir,
        manifests={role.value: path for role, path in service.manifests.items()},
        options=dict(service.options),
        role_options={
            role.value: pb.EngineOptions(values=dict(options))
            for role, options in service.role_options.items()
        },
        release=service.release,
        dp_size={role.value: size for role, size in service.dp_size.items()},
    )
