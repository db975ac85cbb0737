"""Converts the facts about a model's image input between an instance's record and the core."""

from __future__ import annotations

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.core.images.token_grid import GridRule
from pdmesh.v1 import common_pb2


def images_to_proto(facts: ImageFacts) -> common_pb2.ImageFacts:
    found = common_pb2.ImageFacts(
        placeholder=facts.placeholder, expansion=facts.expansion, max_images=facts.max_images
    )
    if (rule := facts.grid) is not None:
        grid = common_pb2.ImageGrid(
            factor=rule.factor, min_pixels=rule.min_pixels, max_pixels=rule.max_pixels
        )
        found.grid.CopyFrom(grid)
    return found


def images_from_proto(record: common_pb2.InstanceRecord) -> ImageFacts | None:
    """None if the instance's model takes no images."""
    if not record.HasField("images"):
        return None
    m = record.images
    rule = None
    if m.HasField("grid"):
        rule = GridRule(m.grid.factor, m.grid.min_pixels, m.grid.max_pixels)
    return ImageFacts(m.placeholder, tuple(m.expansion), m.max_images, rule)
