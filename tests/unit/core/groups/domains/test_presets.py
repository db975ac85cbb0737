"""A file gives the sizes of domains as numbers or by the name of a proven shape."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import Change, Service, diff, problems, revision_of
from pdmesh.core.model import Role
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest

FILE = """
services:
  default: {service}
groups:
  chat: {{prefill: 2, decode: 2}}
"""


def service(text: str) -> Service:
    return read(FILE.format(service=text)).services["default"]


@pytest.mark.req("S121")
def test_one_size_is_for_all_roles_that_generate_and_a_size_of_one_says_nothing() -> None:
    everywhere = service("{dp_size: 4}")
    assert everywhere.dp_size == dict.fromkeys((Role.PREFILL, Role.DECODE, Role.FUSION), 4)
    assert service("{dp_size: {decode: 8, prefill: 1}}").dp_size == {Role.DECODE: 8}
    assert service("{dp_size: 1}") == Service()


@pytest.mark.req("S134")
@pytest.mark.parametrize(
    ("name", "tensor_parallel", "ranks"),
    [("low-concurrency", 4, 1), ("latency", 1, 8), ("throughput", 2, 4), ("unified", 2, 8)],
)
def test_a_shape_of_table_6_is_named_by_its_use(
    name: str, tensor_parallel: int, ranks: int
) -> None:
    named = service(f"{{parallel: {name}}}")
    for role in (Role.PREFILL, Role.DECODE):
        assert named.ranks_of(role) == ranks
        assert named.options_for(role)["tensor_parallel_size"] == str(tensor_parallel)


@pytest.mark.req("S134")
def test_what_the_file_says_itself_overrides_the_shape() -> None:
    own = service(
        "{parallel: {decode: unified}, dp_size: {decode: 2}, options: {tensor_parallel_size: 8}}"
    )
    assert own.dp_size == {Role.DECODE: 2}
    assert own.options_for(Role.DECODE)["tensor_parallel_size"] == "8"
    assert own.ranks_of(Role.PREFILL) == 1


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{dp_size: 0}", "services.default.dp_size"),
        ("{dp_size: 257}", "services.default.dp_size"),
        ("{dp_size: {decode: two}}", "services.default.dp_size.decode"),
        ("{dp_size: {encoder: 2}}", "services.default.dp_size.encoder"),
        ("{parallel: fast}", "services.default.parallel"),
    ],
)
def test_an_impossible_size_is_refused_with_its_field(text: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        service(text)
    assert error.value.field == field
    assert error.value.message.startswith("line 3: ")


def test_a_size_is_part_of_the_revision_and_no_size_leaves_it_as_it_was() -> None:
    plain = Service(model="m")
    assert revision_of(plain, "kv/1") == "9a60cedfe902"  # the revision before domains existed
    assert revision_of(Service(model="m", dp_size={Role.DECODE: 2}), "kv/1") != "9a60cedfe902"


@pytest.mark.req("S29", "S121")
def test_an_automatic_ratio_needs_one_size_for_both_roles() -> None:
    text = FILE.format(service="{dp_size: {decode: 2}}")
    auto = "scenarios:\n  default: {ratio: auto}\n"
    with pytest.raises(InvalidRequest, match="a prefill has 1 ranks, a decode 2"):
        read(text + auto)
    assert not list(problems(read(FILE.format(service="{dp_size: 2}") + auto)))


def test_a_difference_shows_the_size_and_the_group_counts_its_instances() -> None:
    before = read(FILE.format(service="{}"))
    after = read(FILE.format(service="{dp_size: {decode: 8}}"))
    assert Change("services.default.dp_size.decode", None, "8") in diff(before, after)
    assert after.num_instances(after.groups["chat"]) == 2 + 2 * 8
