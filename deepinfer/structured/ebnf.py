"""EBNF grammars `root ::= ...`, as llama.cpp and XGrammar write them, in llguidance's Lark dialect.

Rules that do not recurse become lexemes; so a grammar without recursion is one lexeme, a regular expression. In one
with recursion, lexemes take as much as they can, as in a compiler.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from deepinfer.errors import shown
from deepinfer.structured.endless import ENDS, All, Ending, Some, endless

MAX_DEPTH = 64  # of groups within groups
MAX_LARK_DEPTH = 16
MAX_REPEAT = 100_000
_SPACE = re.compile(r"(?:\s|\#[^\n]*+)*+")
_TOKEN = re.compile(
    _SPACE.pattern
    + r"""(?:
    (?P<rule>[A-Za-z0-9_][\w-]*+)(?P<defines>(?:\s|\#[^\n]*+)*+::=)? | "(?P<text>(?:\\.|[^"\\])*+)" |
    \[(?P<negates>\^?)(?P<chars>(?:\\.|[^\]\\])*+)\] | (?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[().|])
    )""",
    re.VERBOSE,
)
_CHAR = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in "\"\\[]-^/'"}}


@dataclass(frozen=True)
class Lexeme:
    """Text in the words of Lark: a string or a regular expression."""

    lark: str


@dataclass(frozen=True)
class Reference:
    rule: str


@dataclass(frozen=True)
class Repeat:
    node: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Sequence:
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    nodes: tuple[Node, ...]


Node = Lexeme | Reference | Repeat | Sequence | Choice


def ebnf_to_lark(text: str) -> str:
    """Raises ValueError for what is no grammar, and for a rule that no finite text satisfies."""
    rules = _Parser(text).rules()
    never_ending = endless({name: _ending(node) for name, node in rules.items()})
    if never_ending:
        message = f"no finite text satisfies rule {shown(never_ending[0])}: what it needs always needs itself"
        raise ValueError(f"so_args.schema: {message}")
    recursive = set(endless({name: All(tuple(_references(node))) for name, node in rules.items()}))
    names = {name: f"{'r' if name in recursive else 'T'}{number}" for number, name in enumerate(rules)}
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *_Writer(names).lines(rules)]) + "\n"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        used: dict[str, int] = {}
        while (token := self._next()) is not None:
            name = token["rule"]
            if token["defines"] is None:
                raise self._error('a rule must begin with "name ::="')
            if name in rules:
                raise self._error(f"rule {shown(name)} is defined twice")
            rules[name] = self._choice(MAX_DEPTH, used)
        for name in ("root", *used):
            if name not in rules:
                raise self._error(f"rule {shown(name)} is not defined", used.get(name))
        return rules

    def _next(self, keep: bool = False) -> re.Match[str] | None:
        """The next token; None at the end."""
        token = _TOKEN.match(self._text, self._position)
        if token is None:
            self._position = _SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text):
                raise self._error("something that is no part of a rule")
        elif not keep:
            self._position = token.end()
        return token

    def _choice(self, depth: int, used: dict[str, int]) -> Node:
        if depth == 0:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        options: list[Node] = []
        parts: list[Node] = []
        while (token := self._next(keep=True)) is not None and token["defines"] is None and token["mark"] != ")":
            self._position = token.end()
            if token["mark"] == "|":
                options.append(Sequence(tuple(parts)))
                parts = []
            elif token["repeat"]:
                if not parts or isinstance(parts[-1], Repeat):
                    what = "a repetition, which needs a group around it" if parts else "nothing"
                    raise self._error(f"{shown(token['repeat'])} repeats {what}")
                parts[-1] = Repeat(parts[-1], *self._counts(token["repeat"]))
            elif token["mark"] == "(":
                parts.append(self._choice(depth - 1, used))
                closing = self._next()
                if closing is None or closing["mark"] != ")":
                    raise self._error('")" is missing')
            elif token["rule"]:
                used.setdefault(token["rule"], token.start("rule"))
                parts.append(Reference(token["rule"]))
            else:
                parts.append(Lexeme(self._lexeme(token)))
        return Choice((*options, Sequence(tuple(parts)))) if options else Sequence(tuple(parts))

    def _counts(self, repeat: str) -> tuple[int, int | None]:
        if repeat in "*+?":
            return int(repeat == "+"), 1 if repeat == "?" else None
        low, *high = repeat[1:-1].split(",")
        if max(len(number.strip()) for number in (low, *high)) > 9:
            raise self._error(f"{shown(repeat)} must have at most {MAX_REPEAT} repetitions")
        most = int(low) if not high else int(high[0]) if high[0].strip() else None
        if int(low) > MAX_REPEAT or most is not None and not int(low) <= most <= MAX_REPEAT:
            raise self._error(f"{repeat} must have at most {MAX_REPEAT} repetitions, and not fewer than at least")
        return int(low), most

    def _lexeme(self, token: re.Match[str]) -> str:
        if token["mark"] == ".":
            return "/(?s:.)/"
        if token["chars"] is None:
            text = "".join(self._chars(token["text"]))
            return json.dumps(text, ensure_ascii=False) if text.isprintable() else f"/{''.join(map(_coded, text))}/"
        chars, ranges, position = self._chars(token["chars"]), [], 0
        is_dash = [part == "-" for part in _parts(token["chars"])]
        while position < len(chars):
            first = last = chars[position]
            if position + 2 < len(chars) and is_dash[position + 1]:
                last = chars[position + 2]
                position += 2
            if first > last:
                raise self._error(f"the range {first}-{last} is empty")
            ranges.append(f"{_coded(first)}-{_coded(last)}")
            position += 1
        if not ranges:
            raise self._error("a class without characters")
        return f"/[{token['negates']}{''.join(ranges)}]/"

    def _chars(self, text: str) -> list[str]:
        return [self._char(part) for part in _parts(text)]

    def _char(self, part: str) -> str:
        *codes, escaped, plain = _CHAR.fullmatch(part).groups()  # type: ignore[union-attr]
        code = next((int(code, 16) for code in codes if code), None)
        if code is not None:
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"{part} is no character")
            return chr(code)
        if escaped and escaped not in _ESCAPES:
            raise self._error(f"the escape {part} is not known")
        return _ESCAPES[escaped] if escaped else plain

    def _error(self, message: str, position: int | None = None) -> ValueError:
        at = self._position if position is None else position
        line = self._text.count("\n", 0, at) + 1
        return ValueError(f"so_args.schema is not an EBNF grammar: line {line}: {message}")


def _parts(text: str) -> list[str]:
    """Its characters as they are written."""
    return [match[0] for match in _CHAR.finditer(text)]


def _coded(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"


def _ending(node: Node) -> Ending:
    if isinstance(node, Reference):
        return node.rule
    if isinstance(node, Choice):
        return Some(tuple(map(_ending, node.nodes)))
    if isinstance(node, Sequence):
        return All(tuple(map(_ending, node.nodes)))
    return _ending(node.node) if isinstance(node, Repeat) and node.low else ENDS


def _references(node: Node) -> list[str]:
    if isinstance(node, Reference):
        return [node.rule]
    nodes = (node.node,) if isinstance(node, Repeat) else () if isinstance(node, Lexeme) else node.nodes
    return [rule for each in nodes for rule in _references(each)]


class _Writer:
    """Writes rules in the words of Lark, whose groups may be nested less deeply: those further in become rules."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._waiting: list[tuple[str, Node]] = []
        self._num_names = len(names)

    def lines(self, rules: dict[str, Node]) -> list[str]:
        self._waiting = [(self._names[name], node) for name, node in rules.items()]
        lines = []
        while self._waiting:
            name, node = self._waiting.pop()
            lines.append(f"{name}: {self._text(node, name[0], MAX_LARK_DEPTH)}")
        return lines

    def _text(self, node: Node, kind: str, depth: int) -> str:
        """`kind`: the first letter of the names of rules or of lexemes."""
        if isinstance(node, Lexeme):
            return node.lark
        if isinstance(node, Reference):
            return self._names[node.rule]
        if isinstance(node, Choice):
            return " | ".join(self._part(each, kind, depth) for each in node.nodes)
        if isinstance(node, Sequence):
            return " ".join(self._part(each, kind, depth) for each in node.nodes) or '""'
        if node.high == 0:  # Lark has no such repetition
            return '""'
        return f"({self._text(node.node, kind, depth - 1)}){{{node.low},{'' if node.high is None else node.high}}}"

    def _part(self, node: Node, kind: str, depth: int) -> str:
        while isinstance(node, Sequence) and len(node.nodes) == 1:
            node = node.nodes[0]
        if depth <= 0 and not isinstance(node, Lexeme | Reference):
            self._num_names += 1
            name = f"{kind}{self._num_names}"
            self._waiting.append((name, node))
            return name
        is_group = isinstance(node, Choice) or isinstance(node, Sequence) and bool(node.nodes)
        return f"({self._text(node, kind, depth - 1)})" if is_group else self._text(node, kind, depth)
