"""A gateway knows its models by the records of their instances."""

from __future__ import annotations

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.net.convert.image_facts import images_to_proto
from pdmesh.services.gateway.routing.served_models import ServedModels
from pdmesh.v1.common_pb2 import InstanceRecord


def instance(model: str, *unsupported: str, constrains: bool = True) -> InstanceRecord:
    return InstanceRecord(
        model=model, unsupported_shaping=unsupported, supports_constraints=constrains
    )


def seeing(facts: ImageFacts | None) -> InstanceRecord:
    record = instance("m")
    if facts is not None:
        record.images.CopyFrom(images_to_proto(facts))
    return record


def test_images_are_taken_as_by_most_of_the_instances_that_take_any() -> None:
    """The first record does not decide for the others."""
    few, many = ImageFacts(7, (7, 7), 4), ImageFacts(7, (7, 7, 7), 8)
    served = ServedModels()
    served.see([seeing(None), seeing(few), seeing(many), seeing(None), seeing(many)], 0.0)
    assert served.images_of("m") == many
    assert served.images_of("n") is None


def test_as_many_images_are_taken_as_all_of_those_instances_take() -> None:
    served = ServedModels()
    served.see([seeing(ImageFacts(7, (7, 7), most)) for most in (8, 4, 6)], 0.0)
    assert served.images_of("m") == ImageFacts(7, (7, 7), 4)


def test_images_are_taken_as_by_the_last_instance_when_all_are_gone() -> None:
    served = ServedModels()
    facts = ImageFacts(7, (7, 7), 8)
    served.see([seeing(facts)], 0.0)
    served.see([], 1.0)
    assert served.images_of("m") == facts


def test_a_model_supports_what_all_of_its_instances_support() -> None:
    served = ServedModels()
    served.see(
        [instance("m"), instance("m", "min_p", constrains=False), instance("n", "top_k")], 0.0
    )
    assert served.unsupported_shaping("m") == {"min_p"}
    assert served.unsupported_shaping("n") == {"top_k"}
    assert (served.supports_constraints("m"), served.supports_constraints("n")) == (False, True)


def test_the_answer_changes_with_the_instances() -> None:
    served = ServedModels()
    served.see([instance("m", "min_p", constrains=False)], 0.0)
    served.see([instance("m", "bad_words")], 1.0)
    assert served.unsupported_shaping("m") == {"bad_words"}
    assert served.supports_constraints("m")
    served.see([], 2.0)
    assert served.unsupported_shaping("m") == frozenset()
    assert served.supports_constraints("m"), "nothing says otherwise"
