from collections.abc import Iterator

import pytest

from pdmesh import failpoints


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_an_unarmed_failpoint_does_nothing() -> None:
    assert failpoints.hit("prefill.staged") is None


def test_an_action_fires_at_the_named_hit_only() -> None:
    failpoints.arm("a.b=zero-kv@3")
    assert [failpoints.hit("a.b") for _ in range(5)] == [None, None, "zero-kv", None, None]


def test_a_plus_means_from_then_on_and_no_number_means_always() -> None:
    failpoints.arm("a=drop@2+, b=drop")
    assert [failpoints.hit("a") for _ in range(3)] == [None, "drop", "drop"]
    assert [failpoints.hit("b") for _ in range(2)] == ["drop", "drop"]


def test_a_point_may_be_armed_for_one_instance() -> None:
    failpoints.arm("a[prefill-0]=drop")
    assert [failpoints.hit("a", of) for of in ("prefill-0", "prefill-1", "")] == [
        "drop",
        None,
        None,
    ]


def test_the_action_raise_raises_an_error() -> None:
    failpoints.arm("a=raise@1")
    with pytest.raises(failpoints.FailpointHit):
        failpoints.hit("a")


@pytest.mark.parametrize("spec", ["a", "a=", "=x", "a=x@", "a=x@y", "a=x;b=y"])
def test_a_meaningless_failpoint_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="is not name=action"):
        failpoints.arm(spec)
