"""What commands with many options understand beside them: `--help=WORD` and `--json-option.key VALUE`."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand

# Options whose value is a JSON object: their keys can be options of their own, and a mapping in a --config file.
JSON_OPTIONS = ("speculative_config", "default_chat_template_kwargs")
_MAIN_GROUP = "Options"


class OptionCommand(TyperCommand):
    """`--help=all` shows every option, hidden ones too; `--help=GROUP` those of a group (the title of a box of the
    help); `--help=WORD` those whose name or text has the word.

    After an option of JSON_OPTIONS a dot and a key sets that key, over the option itself and the --config file.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        end = args.index("--") if "--" in args else len(args)
        for argument in args[:end]:
            if argument.startswith("--help="):
                print_help(self, ctx, argument.removeprefix("--help="))
                raise typer.Exit
        known = {parameter.name for parameter in self.params}
        keys = take_keys(args, end, [name for name in JSON_OPTIONS if name in known])
        rest = super().parse_args(ctx, args)
        for name, values in keys.items():
            ctx.params[name] = json.dumps(_object(name, ctx.params[name]) | values)
        return rest


def take_keys(args: list[str], end: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Remove `--name.key VALUE` and `--name.key=VALUE` from args[:end]; the values by option and key. VALUE is JSON, or
    else text. Raises ValueError where it is missing."""
    prefixes = {f"--{name.replace('_', '-')}.": name for name in names}
    found: dict[str, dict[str, Any]] = {}
    rest, i = [], 0
    while i < end:
        option, equals, text = args[i].partition("=")
        i += 1
        prefix = option[: option.find(".") + 1]
        if prefix not in prefixes:
            rest.append(args[i - 1])
            continue
        if not equals:
            if i == end:
                raise ValueError(f"{option} requires a value")
            text = args[i]
            i += 1
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found.setdefault(prefixes[prefix], {})[option.removeprefix(prefix).replace("-", "_")] = value
    args[:end] = rest
    return found


def _object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--{name.replace('_', '-')} must be a JSON object, got {text!r}")
    return value


def print_help(command: TyperCommand, ctx: typer.Context, wanted: str) -> None:
    """The help of the options asked for. Raises ValueError naming the groups if there is none."""
    options = [parameter for parameter in command.params if not isinstance(parameter, TyperArgument)]
    groups = {_group(option): None for option in options if not getattr(option, "hidden", False)}
    word = wanted.lower()
    if word == "all":
        found = options
    elif word in (group.lower() for group in groups):
        found = [one for one in options if _group(one).lower() == word and not getattr(one, "hidden", False)]
    else:
        # Hidden ones, too: they are the spellings of other servers that somebody may look for.
        found = [one for one in options if word and word in _text(one)]
    if not found:
        raise ValueError(
            f"--help={wanted}: no option has that in its name or text; --help=all shows all, and the groups are "
            f"{', '.join(groups)}"
        )
    shown = copy(command)
    shown.params = [copy(option) for option in found]
    for option in shown.params:
        option.hidden = False  # type: ignore[attr-defined]
    shown.add_help_option, shown.help, shown.epilog = False, None, None
    print(shown.get_help(ctx), end="")


def _group(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or _MAIN_GROUP


def _text(option: Any) -> str:
    return " ".join((*option.opts, *option.secondary_opts, option.help or "")).lower()
