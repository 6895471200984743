"""Tool-call dialogues: named and invented tools, requests, calls in DSML, results, and requests that need no tool."""
# ruff: noqa: E501 (template tables read better with one entry a line)

import json
import random
from collections.abc import Callable
from string import Template
from typing import Any

from deepinfer.recipe.conversation import Message, ToolCall, ToolDefinition
from deepinfer.train.data import words as w
from deepinfer.train.data.dialogue import EFFORTS, Dialogue, call
from deepinfer.train.data.smalltalk import small_answers
from deepinfer.train.data.tool_table import HELD_OUT_TOOLS, TOOLS, Parameter, ToolSpec

SYLLABLES = "ba ke li mo nu ra si to vu za fle gro pla tri sno dro ket lum pin rok wex zor quil".split()
VERBS = "get set find make start stop open check update delete count move copy fetch list show paint scan tune merge".split()
NOUNS = "robot engine door report garden ticket sensor invoice drone printer pump recipe badge parcel camera lift tank".split()


def invented_word(r: random.Random) -> str:
    return "".join(r.sample(SYLLABLES, r.randint(2, 3)))


def sentence(r: random.Random) -> str:
    return r.choice([
        f"I will come on {r.choice(w.DAYS)}", f"please bring the {r.choice(w.OBJECTS)}", f"see you at the {r.choice(w.PLACES)}",
        f"the {r.choice(w.ANIMALS)} is in the {r.choice(w.PLACES)}", f"do not forget the {r.choice(w.FOODS)}", f"{r.choice(w.NAMES)} is {r.choice(w.MOODS)} today",
        f"I bought a {r.choice(w.COLOURS)} {r.choice(w.OBJECTS)}", "thank you for your help", f"meet me in {r.choice(w.TOWNS)}", "good luck",
    ])  # fmt: skip


SLOTS: dict[str, Callable[[random.Random], Any]] = {
    "town": lambda r: r.choice(w.TOWNS[: len(w.TOWNS) // 2]), "town2": lambda r: r.choice(w.TOWNS[len(w.TOWNS) // 2 :]), "small": lambda r: r.randint(2, 9),
    "number": lambda r: r.choice([r.randint(1, 60), r.randint(2, 20) * 5, r.randint(1, 999)]), "time": lambda r: f"{r.randint(0, 23):02d}:{r.choice([0, 15, 30, 45, r.randint(0, 59)]):02d}",
    "object": lambda r: r.choice(w.OBJECTS), "message": sentence, "topic": lambda r: r.choice(w.TOPICS), "day": lambda r: r.choice(w.DAYS), "hour": lambda r: r.randint(6, 22),
    "event": lambda r: r.choice(["meeting", "party", "lesson", "dinner", "walk", "concert", "lunch", "visit"]), "expression": lambda r: f"{r.randint(1, 999)} {r.choice('+-*/')} {r.randint(1, 99)}",
    "language": lambda r: r.choice("French German Spanish Italian Dutch Polish Swedish Greek Turkish Japanese Korean Hindi".split()),
    "title": lambda r: f"{r.choice(['The ', '', 'My ', 'Old '])}{r.choice(w.COLOURS).title()} {r.choice(w.OBJECTS + w.ANIMALS).title()}",
    "room": lambda r: r.choice(["kitchen", "bedroom", "hall", "bathroom", "office", "cellar", "attic", "garage", "garden", "workshop"]), "colour": lambda r: r.choice(w.COLOURS), "warmth": lambda r: r.randint(15, 26),
    "food": lambda r: r.choice(w.FOODS), "foods": lambda r: r.sample(w.FOODS, r.randint(1, 3)), "symbol": lambda r: "".join(r.sample("ABCDEFGHKLMNPRSTVXZ", r.randint(3, 4))),
    "path": lambda r: f"{r.choice(['', '/home/', 'data/', 'docs/', '/tmp/'])}{r.choice(w.OBJECTS + w.ANIMALS)}{r.choice(['', '_' + str(r.randint(1, 99))])}.{r.choice(['txt', 'md', 'csv', 'json', 'py', 'log'])}",
    "command": lambda r: r.choice(["ls -l", "git status", "df -h", f"cat {r.choice(w.OBJECTS)}.txt", f"echo {r.choice(w.MOODS)}", f"mkdir {r.choice(w.OBJECTS)}", f"rm {r.choice(w.ANIMALS)}.log", f"python {r.choice(w.OBJECTS)}.py", f"grep {r.choice(w.COLOURS)} notes.txt"]),
    "email": lambda r: f"{r.choice(w.NAMES).lower()}@{r.choice(['mail', 'example', 'work', 'post'])}.{r.choice(['com', 'org', 'net'])}", "code": lambda r: f"{invented_word(r)}{r.randint(1, 9999)}",
    "sql": lambda r: f"SELECT {r.choice(['*', 'name', 'count(*)', 'price'])} FROM {r.choice(w.OBJECTS)}s WHERE {r.choice(['id', 'age', 'price'])} {r.choice('<>=')} {r.randint(1, 99)}",
    "image": lambda r: f"{r.choice(w.ANIMALS + w.OBJECTS)}.{r.choice(['png', 'jpg'])}", "pixels": lambda r: r.choice([64, 100, 128, 200, 256, 300, 400, 512, 640, 800, 1024]), "place": lambda r: r.choice(w.PLACES),
    "decimal": lambda r: r.randint(1, 50) / 10, "invented": invented_word,
}  # fmt: skip


def value(r: random.Random, p: Parameter, held_out: bool) -> Any:
    if "|" in p.kind:
        return r.choice(p.kind.split("|"))
    if p.kind == "b":
        return r.random() < 0.5
    if p.slot == "name":
        return r.choice(w.names(held_out))
    return SLOTS[p.slot](r)


def spoken(v: Any) -> str:
    """How a person says an argument."""
    if isinstance(v, list):
        return " and ".join(v) if len(v) < 3 else ", ".join(v[:-1]) + " and " + v[-1]
    return str(v).lower() if isinstance(v, bool) else str(v)


def invented_tool(r: random.Random) -> ToolSpec:
    """A tool with an invented name, so that names and keys must be copied from the declaration."""
    verb, noun = r.choice(VERBS), r.choice([r.choice(NOUNS), invented_word(r)])
    name = r.choice([f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{noun}-{verb}", f"{verb}{noun.title()}"])
    slots = r.sample(
        ["object", "number", "colour", "name", "invented", "day", "town", "code", "time", "decimal"], r.randint(1, 3)
    )
    kinds = {"number": "i", "decimal": "n"}
    parameters: list[Parameter] = []
    for slot in slots:
        key = r.choice([slot, invented_word(r), r.choice(NOUNS) + "_" + r.choice(["id", "name", "kind", "value"])])
        if key not in [p.name for p in parameters]:
            parameters.append(
                Parameter(key, kinds.get(slot, "s"), r.choice(["", f"The {key.replace('_', ' ')}"]), slot)
            )
    said = " and ".join(f"{p.name.replace('_', ' ')} ${p.name}" for p in parameters)
    plain = ", ".join(f"{p.name} = ${p.name}" for p in parameters)
    requests = (f"{verb.title()} the {noun} with {said}.", f"Please {verb} the {noun}: {said}.", f"I want to {verb} the {noun} ({plain}).", f"Use {name} with {plain}.")  # fmt: skip
    result = r.choice(['{"status": "ok"}', '{"value": $n}', '{"done": true, "count": $n}'])
    answer = f"The {noun} is done." if "$n" not in result else f"The {noun} gave $n."
    return ToolSpec(name, f"{verb.title()} the {noun}.", tuple(parameters), requests, result, answer)


def definition(r: random.Random, spec: ToolSpec) -> ToolDefinition:
    schema: dict[str, Any] = {"type": "object", "properties": {p.name: p.schema() for p in spec.parameters}}
    schema["required"] = [p.name for p in spec.parameters if not p.ask]
    return ToolDefinition(spec.name, spec.description if r.random() < 0.9 else None, schema)


def use(r: random.Random, spec: ToolSpec, held_out: bool) -> tuple[str, dict[str, Any], str, str]:
    """(request, arguments, result text, answer) of one use of a tool."""
    arguments = {p.name: value(r, p, held_out) for p in spec.parameters if not p.ask or r.random() < 0.4}
    said = {k: spoken(v) for k, v in arguments.items()}
    extra = {
        "n": str(r.randint(1, 99)),
        "sky": r.choice(w.WEATHER),
        "word": invented_word(r),
        "phone": f"{r.randint(200, 999)}-{r.randint(1000, 9999)}",
    }
    extra |= {slot: str(SLOTS[slot](r)) for slot in ("day", "event", "hour", "food", "time", "place")}
    fill = extra | said
    request = Template(r.choice(spec.requests)).safe_substitute(fill)
    for p in spec.parameters:
        if p.ask and p.name in arguments:
            request += " " + Template(p.ask).safe_substitute(fill)
    return request, arguments, Template(spec.result).safe_substitute(fill), Template(spec.answer).safe_substitute(fill)


def choose_tools(r: random.Random, held_out: bool) -> list[ToolSpec]:
    """1 to 3 tools; a third of them invented."""
    named = [t for t in TOOLS if (t.name in HELD_OUT_TOOLS) == held_out]
    chosen: dict[str, ToolSpec] = {}
    for _ in range(r.choice([1, 2, 2, 3])):
        spec = invented_tool(r) if r.random() < 0.35 else r.choice(named)
        chosen.setdefault(spec.name, spec)
    return list(chosen.values())


def reasoning_for(spec: ToolSpec, arguments: dict[str, Any]) -> str:
    listed = ", ".join(f"{k} = {spoken(v)}" for k, v in arguments.items())
    return f"I should call {spec.name} with {listed}."


def tool_dialogue(r: random.Random, held_out: bool = False, call_only: bool = False) -> Dialogue:
    """Up to three rounds with the same tools: call, result, answer, or a question that needs no tool.

    The last turn is any of these; with `call_only` there is one round and it ends in the call.
    """
    specs = choose_tools(r, held_out)
    tools = tuple(definition(r, s) for s in specs)
    thinking = r.random() < 0.3
    messages: list[Message] = []
    if r.random() < 0.3:
        messages.append(
            Message(
                "system",
                r.choice(
                    [
                        "You are a helpful assistant.",
                        "Use tools.",
                        "You help people at home.",
                        "Use the tools when they help.",
                        "You are nano. Be brief.",
                    ]
                ),
            )
        )
    rounds = 1 if call_only else r.choice([1, 1, 2, 3])
    expected = ""
    for i in range(rounds):
        last = i == rounds - 1
        if not call_only and r.random() < 0.15:
            question, answer = small_answers(r)
            messages.append(Message("user", question))
            messages.append(Message("assistant", answer, reasoning_content="No tool is needed." if thinking else None))
            expected = answer
            continue
        spec = r.choice(specs)
        pairs = [(spec, *use(r, spec, held_out))]
        if len(specs) > 1 and r.random() < 0.1 and not call_only:  # two calls in one turn
            other = r.choice([s for s in specs if s is not spec])
            pairs.append((other, *use(r, other, held_out)))
        messages.append(Message("user", " ".join(p[1] for p in pairs)))
        calls: tuple[ToolCall, ...] = tuple(
            call(p[0].name, json.dumps(p[2], ensure_ascii=False), j) for j, p in enumerate(pairs)
        )
        reasoning = " ".join(reasoning_for(p[0], p[2]) for p in pairs)
        messages.append(Message("assistant", "", reasoning_content=reasoning if thinking else None, tool_calls=calls))
        expected = json.dumps([{"name": p[0].name, "arguments": p[2]} for p in pairs], ensure_ascii=False)
        if last and (call_only or r.random() < 0.3):
            break
        messages += [Message("tool", p[3], tool_call_id=c.id) for p, c in zip(pairs, calls, strict=True)]
        answer = " ".join(p[4] for p in pairs)
        messages.append(
            Message("assistant", answer, reasoning_content="The tool gave the result." if thinking else None)
        )
        expected = answer
    return Dialogue("tool", tuple(messages), tools, thinking, r.choice(EFFORTS) if thinking else None, False, expected)


def tool_call(r: random.Random, held_out: bool = False) -> Dialogue:
    """One request and its call: the form that evaluation uses."""
    return tool_dialogue(r, held_out, call_only=True)
