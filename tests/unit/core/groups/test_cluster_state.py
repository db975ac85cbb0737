"""The groups that the mesh should have: role specs and counts, and each scenario's minimum."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.cluster_state import InstanceStatus, wanted_of
from pdmesh.core.groups.desired import Desired, Group, Scenario, Service
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.model import Phase, Role

SERVICE = Service(
    "m",
    "/m",
    manifests={Role.DECODE: "/m/decode.json"},
    options={"block_size": "64"},
    role_options={Role.DECODE: {"num_slots": "8"}},
    release="1",
)


def desired(*groups: Group, allow_single: bool = False) -> Desired:
    scenarios = {"chat": Scenario("model", allow_single=allow_single)}
    return Desired({"model": SERVICE}, scenarios, dict(zip("abc", groups, strict=False)))


def test_each_role_of_a_group_gets_its_own_artefact_and_options() -> None:
    group = wanted_of(desired(Group("chat", 2, 1)), "kv/1").groups["a"]
    assert (group.size, group.counts[Role.DECODE], group.scenario) == (3, 1, "chat")
    decode, prefill = group.role_specs[Role.DECODE], group.role_specs[Role.PREFILL]
    assert (decode.manifest, prefill.manifest) == ("/m/decode.json", "")
    assert dict(decode.options) == {"block_size": "64", "num_slots": "8"}
    assert dict(prefill.options) == {"block_size": "64"}
    assert decode.revision == prefill.revision == group.revision


@pytest.mark.req("S24")
def test_a_group_runs_what_its_upgrade_says_not_what_the_file_says() -> None:
    groups = desired(Group("chat", 2, 2), Group("chat", 2, 2))
    new = Service(release="2")
    upgrade = Upgrade("chat", SERVICE, 1, new, 2, changed={"b": new})
    now = wanted_of(groups, "kv/1").groups["a"].revision
    wanted = wanted_of(groups, "kv/1", upgrades={"chat": upgrade}).groups
    assert wanted["a"].revision == now != wanted["b"].revision


@pytest.mark.req("S31")
@pytest.mark.parametrize(
    ("groups", "allow_single", "floors"),
    [
        ((Group("chat", 2, 2), Group("chat", 1, 1)), False, (2, 2)),
        ((Group("chat", 2, 2),), True, (1, 1)),
        ((Group("chat", fusion=1), Group("chat", 1, 0)), False, (2, 1)),
    ],
)
def test_a_scenario_keeps_two_of_each_role_unless_it_allows_or_asks_for_fewer(
    groups: tuple[Group, ...], allow_single: bool, floors: tuple[int, int]
) -> None:
    wanted = wanted_of(desired(*groups, allow_single=allow_single), "kv/1")
    assert (wanted.floor("chat", Role.PREFILL), wanted.floor("chat", Role.DECODE)) == floors
    assert wanted.floor("other", Role.PREFILL) == 0


def test_an_instance_counts_as_loaded_once_it_has_its_engine_and_until_it_fails() -> None:
    loaded = {phase for phase in Phase if InstanceStatus("i", 1, phase).is_loaded}
    assert Phase.READY in loaded
    assert loaded.isdisjoint({Phase.BLANK, Phase.LOADING, Phase.FAILED})
