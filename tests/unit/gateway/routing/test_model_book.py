"""What a gateway knows of its models follows their instances."""

from __future__ import annotations

from pdmesh.services.gateway.routing.model_book import ModelBook
from pdmesh.v1.common_pb2 import InstanceRecord


def instance(model: str, *unsupported: str, constrains: bool = True) -> InstanceRecord:
    return InstanceRecord(
        model=model, unsupported_shaping=unsupported, supports_constraints=constrains
    )


def test_a_model_supports_what_all_of_its_instances_support() -> None:
    book = ModelBook()
    book.see([instance("m"), instance("m", "min_p", constrains=False), instance("n", "top_k")], 0.0)
    assert book.unsupported_shaping("m") == {"min_p"}
    assert book.unsupported_shaping("n") == {"top_k"}
    assert (book.supports_constraints("m"), book.supports_constraints("n")) == (False, True)


def test_the_answer_changes_with_the_instances() -> None:
    book = ModelBook()
    book.see([instance("m", "min_p", constrains=False)], 0.0)
    book.see([instance("m", "bad_words")], 1.0)
    assert book.unsupported_shaping("m") == {"bad_words"}
    assert book.supports_constraints("m")
    book.see([], 2.0)
    assert book.unsupported_shaping("m") == frozenset()
    assert book.supports_constraints("m"), "nothing says otherwise"
