"""Content parts: text, images, and what stands in for parts that the model cannot read."""

from collections.abc import Callable, Sequence
from typing import cast

from deepinfer.recipe.conversation import Content, ImageSource, ModelVersion
from deepinfer.recipe.errors import ConversionError

# A part that is known to be well formed; what it becomes depends on the model version.
BuildContent = Callable[[ModelVersion], str | ImageSource]

UNSUPPORTED_IMAGE = "[Unsupported Image]"
UNSUPPORTED_DOCUMENT = "[Unsupported Document]"


def join_parts(parts: Sequence[str | ImageSource]) -> Content:
    """Parts as message content: text joined by blank lines, images kept apart when there are any."""
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join(cast(Sequence[str], parts))
    return tuple(parts)


def image_source(url: str, detail: str, path: str, fault: str) -> BuildContent:
    """An image by data URL or web address; V4 cannot see and gets a placeholder text."""

    def build(version: ModelVersion) -> str | ImageSource:
        if not url.startswith(("data:", "http://", "https://")):
            raise ConversionError(f"{path}: {fault}", path)
        if version == "v4":
            return UNSUPPORTED_IMAGE
        return ImageSource(url, detail, path)  # type: ignore[arg-type]

    return build
