"""The models that the mesh has, and the model and scenario that the names in a request mean."""

from __future__ import annotations

import pytest

from pdmesh.core.catalogue.model_catalogue import FORGET_S, ModelCatalogue, Offer

A, B = Offer("a", "default"), Offer("b", "chat")


def catalogue(*offers: Offer, preferred: str = "") -> ModelCatalogue:
    found = ModelCatalogue(preferred)
    found.see(offers, 0.0)
    return found


def test_a_model_is_known_by_its_name_and_no_other() -> None:
    models = catalogue(A, B)
    assert models.resolve("b", "", 1.0) == "b"
    for unknown in ("c", "A", "a ", "b\n", "x" * 1000):
        assert models.resolve(unknown, "", 1.0) is None
    models.check_invariants()


def test_a_model_that_left_is_away_for_a_while_then_forgotten() -> None:
    models = catalogue(A, B)
    models.see([A], 10.0)
    assert models.resolve("b", "", 9 + FORGET_S) == "b"
    assert models.knows("b", "chat", 9 + FORGET_S)
    assert models.resolve("b", "", 10 + FORGET_S) is None
    assert not models.knows("b", "chat", 10 + FORGET_S)
    assert models.since("b") == 0.0
    models.see([A], 11 + FORGET_S)
    assert models.since("b") is None
    models.see([A, B], 12 + FORGET_S)
    assert models.since("b") == 12 + FORGET_S, "it came back as a new model"
    assert models.resolve("a", "", 1e9) == "a", "a served model is never forgotten"
    models.check_invariants()


def test_default_is_the_model_of_the_scenario() -> None:
    models = catalogue(A, B)
    for asked in ("", "default"):
        assert models.resolve(asked, "", 1.0) == "a"
        assert models.resolve(asked, "chat", 1.0) == "b"
        assert models.resolve(asked, "unknown", 1.0) == "a"
    assert catalogue().resolve("", "", 0.0) is None


def test_default_is_a_served_model_rather_than_one_that_is_away() -> None:
    models = catalogue(A, Offer("c", "default"))
    assert models.resolve("", "", 1.0) == "a"
    models.see([Offer("c", "default")], 2.0)
    assert models.resolve("", "", 3.0) == "c"
    models.see([], 4.0)
    assert models.resolve("", "", 5.0) == "a", (
        "all models are away, so the name means what it meant before"
    )


def test_the_preferred_model_is_the_default_whether_it_is_served_or_not() -> None:
    models = catalogue(A, B, preferred="b")
    assert models.resolve("default", "", 1.0) == "b"
    models.see([A], 2.0)
    assert models.resolve("default", "", 10 * FORGET_S) == "b"
    assert models.resolve("b", "", 10 * FORGET_S) == "b"


def test_a_model_may_be_called_default() -> None:
    models = catalogue(A, Offer("default", "z"))
    assert models.resolve("default", "", 1.0) == "default"
    assert models.resolve("", "", 1.0) == "a"


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([Offer("m", "x"), Offer("m", "default")], "default"),
        ([Offer("m", "x"), Offer("m", "b"), Offer("other", "a")], "b"),
        ([Offer("m", "x"), Offer("other", "default")], "x"),
        ([Offer("m", ""), Offer("m", "b")], "default"),
        ([], "default"),
    ],
)
def test_a_request_without_a_scenario_goes_where_its_model_is(
    offers: list[Offer], expected: str
) -> None:
    assert catalogue(*offers).scenario_of("m", 1.0) == expected


def test_a_scenario_that_serves_the_model_now_goes_before_one_that_did() -> None:
    models = catalogue(Offer("m", "default"), Offer("m", "x"))
    models.see([Offer("m", "x")], 1.0)
    assert models.scenario_of("m", 2.0) == "x"
    models.see([], 3.0)
    assert models.scenario_of("m", 4.0) == "default"


def test_an_instance_without_a_scenario_serves_all_of_them() -> None:
    models = catalogue(Offer("m", ""))
    assert models.knows("m", "long", 1.0)
    assert models.resolve("default", "long", 1.0) == "m"
    models.see([], 2.0)
    assert not models.knows("m", "long", 2.0 + FORGET_S)


def test_ended_requests_take_no_memory() -> None:
    models = ModelCatalogue()
    for turn in range(1000):
        models.see([Offer(f"m{turn}", "default")], turn * 10.0)
        models.check_invariants()
    assert len(models._seen) <= FORGET_S / 10 + 1


def test_what_default_means_is_the_same_while_a_model_is_away_and_when_it_is_back() -> None:
    models = catalogue(Offer("a", "chat"), Offer("b", ""), Offer("c", "default"))
    wanted = ("", "default", "chat", "unknown")
    steady = [models.resolve("", scenario, 1.0) for scenario in wanted]
    assert steady == ["b", "b", "a", "b"]
    models.check_invariants()
    models.see([Offer("b", ""), Offer("c", "default")], 2.0)
    assert models.resolve("", "chat", 3.0) == "b", "the one that is served"
    models.check_invariants()
    models.see([Offer("a", "chat"), Offer("b", ""), Offer("c", "default")], 4.0)
    assert [models.resolve("", scenario, 5.0) for scenario in wanted] == steady
    models.check_invariants()
