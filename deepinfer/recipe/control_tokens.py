"""Control tokens by role.  Their IDs come from the loaded tokenizer, found by spelling (recipe spec, 1)."""

from collections.abc import Mapping
from types import MappingProxyType

# The bar is U+FF5C and the underscore U+2581.
CONTROL_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "bos": "<｜begin▁of▁sentence｜>",
        "eos": "<｜end▁of▁sentence｜>",
        "pad": "<｜▁pad▁｜>",
        "system": "<｜System｜>",
        "user": "<｜User｜>",
        "assistant": "<｜Assistant｜>",
        "think_start": "<think>",
        "think_end": "</think>",
        "dsml": "｜DSML｜",
        "latest_reminder": "<｜latest_reminder｜>",
        "image": "<｜image｜>",
        "ref": "<｜ref｜>",
        "ref_end": "<｜/ref｜>",
        "box": "<｜box｜>",
        "box_end": "<｜/box｜>",
        "point": "<｜point｜>",
        "point_end": "<｜/point｜>",
        "polygon": "<｜polygon｜>",
        "polygon_end": "<｜/polygon｜>",
    }
)

# What the model writes itself to point into an image: control tokens again when an assistant turn comes back.
GROUNDING_ROLES = ("ref", "ref_end", "box", "box_end", "point", "point_end", "polygon", "polygon_end")

# Every prompt needs these; V4.1 writes a system token too.  The others are asked for when a prompt uses them.
REQUIRED_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "v4": ("bos", "eos", "user", "assistant", "think_start", "think_end", "dsml"),
        "v4.1": ("bos", "eos", "user", "assistant", "think_start", "think_end", "dsml", "system"),
    }
)
