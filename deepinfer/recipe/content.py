"""Content parts: text, images, and what stands in for parts that the model cannot read."""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import cast

from deepinfer.recipe.conversation import Content, ImageSource, ModelVersion
from deepinfer.recipe.errors import ConversionError

# A part that is known to be well formed; what it becomes depends on the model version.
BuildContent = Callable[[ModelVersion], str | ImageSource]

UNSUPPORTED_IMAGE = "[Unsupported Image]"
UNSUPPORTED_DOCUMENT = "[Unsupported Document]"
_IMAGE_TYPES = ("image/webp", "image/png", "image/jpeg", "image/jpg", "image/gif")


def join_parts(parts: Sequence[str | ImageSource]) -> Content:
    """Parts as message content: text joined by blank lines, images kept apart when there are any."""
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join(cast(Sequence[str], parts))
    return tuple(parts)


def image_source(url: str, detail: str, path: str, fault: str, data_urls: bool = True) -> BuildContent:
    """An image by web address, or by data URL where those are allowed.  V4 cannot see and gets a placeholder text.

    ``fault`` is what a refusal says about an address of another form.
    """

    def build(version: ModelVersion) -> str | ImageSource:
        if version == "v4":
            return UNSUPPORTED_IMAGE
        scheme = url[:8].lower()
        if scheme.startswith("data:") and ";base64," in url and data_urls:
            check_data_url(url, path)
        elif not scheme.startswith(("http://", "https://")):
            raise ConversionError(f"{path}: {fault}", path)
        return ImageSource(url, detail, path)  # type: ignore[arg-type]

    return build


def refused_image(path: str, fault: str) -> BuildContent:
    """An image that cannot be had, which only a model that sees complains about."""

    def build(version: ModelVersion) -> str:
        if version == "v4":
            return UNSUPPORTED_IMAGE
        raise ConversionError(f"{path}: {fault}", path)

    return build


def check_data_url(url: str, path: str) -> None:
    """Raise ConversionError unless a base64 data URL holds an image type we know, and base64."""
    head, data = url[len("data:") :].split(";base64,", 1)
    if head.split(";")[0].lower() not in _IMAGE_TYPES:
        raise ConversionError(
            f"{path}: You have uploaded an unsupported file. Please make sure your file is valid and has one of the "
            "following formats: webp, png, jpeg, and gif.",
            path,
        )
    check_base64(data, f"{path}: Invalid base64 data", path)


def check_base64(data: str, message: str, path: str) -> None:
    """Raises ConversionError with `message` for what is no base64."""
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ConversionError(message, path) from None
