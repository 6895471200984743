"""A rendered prompt: text, and which ranges of it are control tokens."""

import re
from dataclasses import dataclass, field

from deepinfer.recipe.control_tokens import CONTROL_TOKENS, GROUNDING_ROLES
from deepinfer.recipe.conversation import Content, ImageSource

_ROLE_OF = {text: role for role, text in CONTROL_TOKENS.items()}


def _pattern(roles: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(re.escape(CONTROL_TOKENS[role]) for role in roles) + ")")


_TEMPLATE_TOKEN = _pattern(("think_start", "think_end", "dsml"))
_GROUNDING_TOKEN = _pattern(GROUNDING_ROLES)


@dataclass(frozen=True)
class Prompt:
    """``control_ranges[i]`` (code points, end exclusive, ascending) holds a control token of role ``control_roles[i]``.

    Text outside the ranges is ordinary, even where it spells a control token.  ``images[i]`` belongs to the i-th range
    of role "image".
    """

    text: str
    control_ranges: tuple[tuple[int, int], ...] = ()
    control_roles: tuple[str, ...] = ()
    images: tuple[ImageSource, ...] = ()


@dataclass
class PromptWriter:
    """Collects text and control tokens in order."""

    pieces: list[str] = field(default_factory=list)
    length: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    images: list[ImageSource] = field(default_factory=list)

    def text(self, text: str) -> None:
        """Text from the client: never a control token."""
        self.pieces.append(text)
        self.length += len(text)

    def control(self, role: str) -> None:
        """A control token, by its role."""
        start = self.length
        self.text(CONTROL_TOKENS[role])
        self.ranges.append((start, self.length))
        self.roles.append(role)

    def template(self, text: str) -> None:
        """Fixed text of ours: DSML marks and think tags in it are control tokens."""
        self._split(text, _TEMPLATE_TOKEN)

    def assistant_text(self, text: str) -> None:
        """Answer or reasoning of the history: only the tokens that point into images are control tokens in it.

        They mark regions and cannot open or close a turn, so a forged one deceives nobody.
        """
        self._split(text, _GROUNDING_TOKEN)

    def _split(self, text: str, tokens: re.Pattern[str]) -> None:
        for i, piece in enumerate(tokens.split(text)):
            if i % 2:
                self.control(_ROLE_OF[piece])
            else:
                self.text(piece)

    def content(self, content: Content) -> None:
        """Parts joined by a blank line, each image as its placeholder token."""
        for i, part in enumerate((content,) if isinstance(content, str) else content):
            if i:
                self.text("\n\n")
            if isinstance(part, str):
                self.text(part)
            else:
                self.control("image")
                self.images.append(part)

    def finish(self) -> Prompt:
        """What was written, with its control tokens and images."""
        return Prompt("".join(self.pieces), tuple(self.ranges), tuple(self.roles), tuple(self.images))
