"""Rules of grammars and schemas that need themselves: nothing finite satisfies them, an output would never end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class All:
    """What ends if all parts do."""

    parts: tuple[Ending, ...] = ()


@dataclass(frozen=True)
class Some:
    """What ends if one part does."""

    parts: tuple[Ending, ...]


Ending = All | Some | str  # str: the name of a rule
ENDS = All()


def endless(rules: Mapping[str, Ending]) -> list[str]:
    """The rules that never end: those that are not in the least fixed point."""
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for used in names_in(rule):
            users.setdefault(used, []).append(name)
    ending: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ending and _ends(rules[name], ending):
            ending.add(name)
            waiting += users.get(name, ())
    return [name for name in rules if name not in ending]


def _ends(rule: Ending, ending: set[str]) -> bool:
    if isinstance(rule, str):
        return rule in ending
    results = (_ends(part, ending) for part in rule.parts)
    return all(results) if isinstance(rule, All) else any(results)


def names_in(rule: Ending) -> Iterator[str]:
    """The rules that a rule's body refers to."""
    if isinstance(rule, str):
        yield rule
    else:
        for part in rule.parts:
            yield from names_in(part)
