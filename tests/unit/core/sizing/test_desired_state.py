"""The master accepts the desired state that a sizing plan writes."""

from __future__ import annotations

import pytest
import yaml

from loadtests.sizing.scenes import SCENES
from pdmesh.core.groups.desired import Desired
from pdmesh.core.model import Role
from pdmesh.core.sizing.deployment import Deployment
from pdmesh.core.sizing.desired_state import desired_state
from pdmesh.core.sizing.search import smallest_fusion, smallest_pair
from pdmesh.desired_file import read


def applied(found: object, least: int = 2, max_len: int = 0) -> Desired:
    assert isinstance(found, Deployment)
    wanted = SCENES[1].wanted(10.0, least=least)
    data = desired_state(found, wanted.traffic, wanted.goals, "/models/large", max_len)
    return read(yaml.safe_dump(data))


def test_the_file_of_a_pair_is_read_with_its_numbers() -> None:
    found = smallest_pair(SCENES[1].wanted(10.0))
    assert isinstance(found, Deployment)
    desired = applied(found)
    prefill, decode = found.pools
    group = desired.groups["planned"]
    assert (group.prefill, group.decode) == (prefill.count, decode.count)
    service = desired.service_of(group)
    assert service.model_dir == "/models/large"
    options = service.options_for(Role.DECODE)
    assert options["tensor_parallel_size"] == str(decode.kind.tp)
    assert options["num_slots"] == str(decode.slots)
    assert 0 < decode.kind.kv_bytes - int(options["kv_cache_bytes"]) < 2**20
    scenario = desired.scenarios["default"]
    assert scenario.slo is not None


def test_a_single_instance_is_allowed_where_it_was_asked_for() -> None:
    found = smallest_fusion(SCENES[1].wanted(0.5, least=1))
    assert isinstance(found, Deployment)
    assert found.pools[0].count == 1
    assert applied(found, least=1).scenarios["default"].allow_single


@pytest.mark.parametrize(("max_len", "given"), [(0, 64), (40_960, 40_960)])
def test_the_context_has_room_for_the_longest_request(max_len: int, given: int) -> None:
    wanted = SCENES[1].wanted(10.0)
    desired = applied(smallest_fusion(wanted), max_len=max_len)
    length = int(desired.services["planned"].options["max_model_len"])
    assert length % given == 0
    assert length > wanted.traffic.longest
