"""The images of a chat: finds them in the messages, and puts their tokens into the prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from pdmesh.core.images.prompt_image import (
    ImageFacts,
    PromptImage,
    check_placeholders,
    expanded,
)
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.images.loading import MAX_SENT_BYTES, AskedImage, LoadedImages
from pdmesh.services.gateway.openai.chat_messages import (
    ChatMessage,
    ContentPart,
    ImageFile,
    ImageUrl,
)


def asked_images(messages: Sequence[ChatMessage]) -> list[AskedImage]:
    """The images in the order of the messages and their parts. Raises InvalidRequest."""
    return [_asked(part, field) for part, field in _image_parts(messages)]


def has_images(messages: Sequence[ChatMessage]) -> bool:
    return next(_image_parts(messages), None) is not None


def no_images(messages: Sequence[ChatMessage], model: str) -> InvalidRequest:
    """The error for a model that takes no images. It names the first image."""
    _, field = next(_image_parts(messages))
    message = f"{field}: the model {model} takes no images; only parts of type text are supported"
    return InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)


def check_places(tokens: array[int], facts: ImageFacts, num_images: int) -> None:
    """Raises InvalidRequest."""
    try:
        check_placeholders(tokens, facts, num_images)
    except InvalidRequest as exc:
        raise InvalidRequest(exc.message, field="messages") from None


def placed(
    tokens: array[int], facts: ImageFacts, loaded: LoadedImages
) -> tuple[array[int], tuple[PromptImage, ...]]:
    """The prompt with each image's tokens, and the images. Call `check_places` before."""
    prompt, places = expanded(tokens, facts, loaded.sizes)
    found = zip(places, loaded.digests, loaded.data, strict=True)
    return prompt, tuple(
        PromptImage(place.position, place.num_tokens, digest, data, place.num_rows)
        for place, digest, data in found
    )


def check_sent(images: Sequence[PromptImage], num_choices: int) -> None:
    """Limit the bytes of images that are sent to instances. Raises InvalidRequest.

    All images are sent once for each choice of the call.
    """
    if num_choices * sum(len(image.data) for image in images) > MAX_SENT_BYTES:
        message = f"n times the images' bytes may be {MAX_SENT_BYTES} at most"
        raise InvalidRequest(message, field="n")


def _image_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[ContentPart, str]]:
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            for at, part in enumerate(message.content):
                if part.type == "image_url":
                    yield part, f"messages[{index}].content[{at}]"


def _asked(part: ContentPart, where: str) -> AskedImage:
    field = f"{where}.image_url"
    if isinstance(part, ImageFile):
        format_field = f"{where}.media_type"
        return AskedImage(field, "", part.base64, part.data, part.format, format_field)
    given = part.image_url
    if isinstance(given, ImageUrl):
        given, field = given.url, f"{field}.url"
    if not given:
        raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
    return AskedImage(field, url=given)
