"""The models that the instances serve now, with their tokenizers and abilities.

A gateway has two objects of the class `ServedModels`. One has the models that generate answers, the
other has the pooling models, which make vectors or scores. A scenario is a kind of requests with
its own instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdmesh.core.catalogue.model_catalogue import ModelCatalogue, Offer
from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.net.convert.image_facts import images_from_proto
from pdmesh.v1.common_pb2 import InstanceRecord, ModelText


class ServedModels:
    """`preferred` is the model that clients mean by the name `default`.

    If it is empty, `default` means a model of the request's scenario.
    """

    def __init__(self, preferred: str = "") -> None:
        self.catalogue = ModelCatalogue(preferred)
        # One record for each known model, kept for a while after all instances of the model are
        # gone.
        self._references: dict[str, InstanceRecord] = {}
        self._by_model: dict[str, list[InstanceRecord]] = {}
        self._texts: dict[str, ModelText | None] = {}
        self._unsupported_shaping: dict[str, frozenset[str]] = {}
        self._supporting_constraints: frozenset[str] = frozenset()
        self._images: dict[str, ImageFacts | None] = {}

    def see(self, records: Iterable[InstanceRecord], now: float) -> None:
        """Take over the records of all instances that take requests now.

        The first record of a model represents the model.
        """
        self._by_model = {}
        for record in records:
            if record.model:
                self._by_model.setdefault(record.model, []).append(record)
        self._texts = {model: _common_text(of) for model, of in self._by_model.items()}
        self._unsupported_shaping = {
            model: frozenset(field for record in of for field in record.unsupported_shaping)
            for model, of in self._by_model.items()
        }
        self._images = {model: _common_images(of) for model, of in self._by_model.items()}
        self._supporting_constraints = frozenset(
            model
            for model, of in self._by_model.items()
            if all(record.supports_constraints for record in of)
        )
        self._references |= {model: of[0] for model, of in self._by_model.items()}
        offers = {Offer(r.model, r.scenario) for of in self._by_model.values() for r in of}
        self.catalogue.see(offers, now)
        for model in [m for m in self._references if self.catalogue.since(m) is None]:
            del self._references[model]

    def serving(self, model: str) -> Sequence[InstanceRecord]:
        return self._by_model.get(model, ())

    def reference(self, model: str) -> InstanceRecord | None:
        """An instance that represents the model.

        If the model has no instances now, this is the last one that was seen.
        """
        served_by = self._by_model.get(model)
        return served_by[0] if served_by else self._references.get(model)

    def unsupported_shaping(self, model: str) -> frozenset[str]:
        """The fields of `LogitShaping` that not every instance of the model supports."""
        return self._unsupported_shaping.get(model, frozenset())

    def supports_constraints(self, model: str) -> bool:
        """Whether all instances of the model support constraints.

        True if the model has no instances.
        """
        return model in self._supporting_constraints or model not in self._by_model

    def images_of(self, model: str) -> ImageFacts | None:
        """How the model takes images. None if no instance of the model takes images.

        The instances may differ, for example during an upgrade. The result is then the way in which
        most of them take images.
        """
        if model in self._images:
            return self._images[model]
        reference = self._references.get(model)
        return images_from_proto(reference) if reference is not None else None

    def text_of(self, model: str) -> ModelText | None:
        """The model's tokenizer files. None if no instance of the model has such files.

        The instances may differ, for example during an upgrade. The result then has the most common
        vocabulary.
        """
        if model in self._texts:
            return self._texts[model]
        reference = self._references.get(model)
        return reference.text if reference is not None and reference.text.digest else None

    def texts(self) -> list[tuple[str, str]]:
        """The models that have instances, by name, each with the digest of its tokenizer files."""
        return [(m, text.digest if text else "") for m, text in sorted(self._texts.items())]

    def text_sources(self, model: str) -> list[InstanceRecord]:
        """The instances with the files that `text_of` returns."""
        text = self.text_of(model)
        return [r for r in self.serving(model) if text is not None and r.text.digest == text.digest]


def _common_text(records: Sequence[InstanceRecord]) -> ModelText | None:
    texts = {r.text.digest: r.text for r in records if r.text.digest}
    if len(texts) < 2:
        return next(iter(texts.values()), None)
    num = Counter(r.text.vocabulary for r in records)
    return max(texts.values(), key=lambda text: (num[text.vocabulary], text.digest))


def _common_images(records: Sequence[InstanceRecord]) -> ImageFacts | None:
    """The image facts of the largest set of instances that turn an image into the same tokens.

    `max_images` is the least in this set.
    """
    found = [facts for record in records if (facts := images_from_proto(record)) is not None]
    if not found:
        return None
    num = Counter(map(_tokens_of, found))
    tokens = max(num, key=lambda tokens: (num[tokens], tokens))
    chosen = [facts for facts in found if _tokens_of(facts) == tokens]
    return replace(chosen[0], max_images=min(facts.max_images for facts in chosen))


def _tokens_of(facts: ImageFacts) -> tuple[int | tuple[int, ...], ...]:
    """The facts that determine an image's tokens, as values that can be ordered."""
    rule = facts.grid
    grid = (rule.factor, rule.min_pixels, rule.max_pixels) if rule is not None else ()
    return facts.placeholder, facts.expansion, grid
