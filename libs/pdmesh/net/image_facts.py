"""How a model takes images, in an instance's record."""

from __future__ import annotations

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.v1 import common_pb2


def images_to_proto(facts: ImageFacts) -> common_pb2.ImageFacts:
    return common_pb2.ImageFacts(
        placeholder=facts.placeholder, expansion=facts.expansion, max_images=facts.max_images
    )


def images_from_proto(record: common_pb2.InstanceRecord) -> ImageFacts | None:
    """None if the instance's model takes no images."""
    if not record.HasField("images"):
        return None
    m = record.images
    return ImageFacts(m.placeholder, tuple(m.expansion), m.max_images)
