"""Regular expressions, so that every implementation agrees that a text matches."""

import re

from deepinfer.errors import shown

# Beyond ASCII and at line ends, dialects disagree. A class gets what they have in common, a negated one what any of
# them means.
_NARROW = {
    r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r" \t\n\r\f\v",
    r"\D": r"\P{Nd}", r"\W": r"[^\p{L}\p{M}\p{N}\p{Pc}_]", r"\S": r"[^\s\x{1C}-\x{1F}\x{85}\x{FEFF}]",
}  # fmt: skip
_WIDE = {
    r"\d": r"\p{Nd}", r"\w": r"\p{L}\p{M}\p{N}\p{Pc}_", r"\s": r"\s\x{1C}-\x{1F}\x{85}\x{FEFF}",
    r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]", r"\S": r"[^ \t\n\r\f\v]",
}  # fmt: skip
_DOT = r"[^\n\r\x{2028}\x{2029}]"


# What dialects do not agree on has no portable meaning.
_OUTSIDE = {
    r"\z": "the end of the text", r"\A": "the start of the text", r"\a": "the bell", r"\b{": "a word's half",
}  # fmt: skip
_OPERATIONS = ("&&", "--", "~~")
_PART = re.compile(
    r"\\[pPxu]\{[^}]*\}|\\b\{|\\.|\{\d*,?\d*\}|\[\^?\]|\[\^|&&|--|~~|\(\?[A-Za-z-]+[:)]|.", flags=re.DOTALL
)


def portable_pattern(pattern: str) -> str:
    r"""The pattern with classes (`\d`, `\W`, `.`) that match only what they match in Python, ECMAScript and Rust.

    Raises ValueError for what means something else in one of them than in another: a quantifier that is possessive in
    Python, an error in ECMAScript, and two in Rust; nested and POSIX classes, operations on classes, some flags.
    """
    out, table, in_class, last = [], _NARROW, False, ""
    dot = "." if "(?s" in pattern else _DOT  # there, it means every character everywhere
    for part in _PART.findall(pattern):
        if part == "+" and not in_class and last[:1] in ("*", "+", "?", "{"):
            raise _unsupported(f"the quantifier {last}+", pattern)
        _check_part(part, in_class, pattern)
        last = part
        if part in table:
            part = table[part] if in_class else f"[{table[part]}]"
        elif part == "." and not in_class:
            part = dot
        elif part in (r"\<", r"\>"):  # words begin and end there in Rust
            part = part[1]
        elif part in ("[", "[^", "]"):
            in_class = part != "]"
            table = _WIDE if part == "[^" else _NARROW
        out.append(part)
    return "".join(out)


def _check_part(part: str, in_class: bool, pattern: str) -> None:
    if in_class and part[0] == "[":
        raise _unsupported(r"a class within a class (a bracket as such is \[)", pattern)
    if in_class and part in _OPERATIONS:
        raise _unsupported(f"the operation {part} on classes", pattern)
    if part in ("[]", "[^]"):
        raise _unsupported(r"a class that begins with ] (which is \])", pattern)
    if part in _OUTSIDE:
        raise _unsupported(f"{part} ({_OUTSIDE[part]})", pattern)
    if part.startswith(r"\x{"):
        raise _unsupported(r"\x{...} (which is \u{...})", pattern)
    if part.startswith("{,") and not in_class:
        raise _unsupported(f"the quantifier {part} (which is {{0{part[1:]})", pattern)
    if part.startswith("(?") and not in_class and not set(part[2:-1]) <= set("ims-"):
        raise _unsupported(f"the flags {part}", pattern)


def _unsupported(what: str, pattern: str) -> ValueError:
    return ValueError(f"so_args.schema: {what} is not supported in {shown(pattern)}")


def without_anchors(pattern: str) -> str:
    """A pattern for matching as a whole: anchors at its ends say nothing new."""
    start = 1 if pattern.startswith("^") else 0
    end = len(pattern)
    if pattern.endswith("$") and (end - 1 - len(pattern[:-1].rstrip("\\"))) % 2 == 0:
        end -= 1
    inner = pattern[start:end]
    # "^a|b$" is no anchored alternative, and "a|b" would be a wider one: such a pattern stays as it is.
    return pattern if inner != pattern and _has_alternatives(inner) else inner


def _has_alternatives(pattern: str) -> bool:
    """Whether there is a `|` outside of groups and classes."""
    depth, in_class = 0, False
    for part in re.findall(r"\\.|.", pattern, flags=re.DOTALL):
        if in_class:
            in_class = part != "]"
        elif part == "[":
            in_class = True
        elif part in ("(", ")"):
            depth += 1 if part == "(" else -1
        elif part == "|" and depth == 0:
            return True
    return False
