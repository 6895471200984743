"""Greedy answers of a checkpoint to the held-out evaluation prompts, scored by kind, and free-running samples.

    python -m deepinfer.train.answers --prompts DATA/eval.jsonl --out benchmarks/nano
    python -m deepinfer.train.answers --prompts DATA/eval_seen.jsonl --out benchmarks/nano --name answers_known

Writes answers.json (rates, and every wrong answer with what was expected) and samples.json; the second command: new
prompts over the names, tools and sums that training uses too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from deepinfer.llm import LLM
from deepinfer.params import SamplingParams
from deepinfer.recipe import (
    AnswerText,
    Detokenizer,
    ParsingOptions,
    StreamParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
    encode_prompt,
    render_chat,
)
from deepinfer.train.data.passages import NOT_SAID

MAX_TOKENS = 200
SAMPLE_TOKENS = 100
STORY_PROMPTS = (
    "Once upon a time, there was a lighthouse keeper who",
    "The old market was busy that morning.",
    "The `random` module provides",
    "def read_lines(path):\n",
)
CHAT_PROMPTS = (
    "Tell me a short story about a lighthouse keeper.",
    "What is a library?",
    "Describe a walk in the forest in autumn.",
    "Explain why we should drink water.",
    "Who are you?",
    "Read this: Mira is a baker. She lives in Lisbon and has a cat named Tofu. Where does Mira live?",
)


def parse_output(token_ids: list[int], tokenizer: Tokenizer, thinking: bool) -> tuple[str, list[dict[str, Any]]]:
    """Answer text (without the reasoning) and tool calls of one completion; arguments that are no JSON become None."""
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(token_ids) + detokenizer.finish()
    options = ParsingOptions(parse_tool_calls=True, thinking_initial_stage="ReasoningStart" if thinking else None)
    parser = StreamParser(options)
    answer = ""
    calls: list[dict[str, Any]] = []
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case AnswerText(piece):
                answer += piece
            case ToolCallStart(_, _, name):
                calls.append({"name": name, "arguments": ""})
            case ToolCallArguments(_, piece):
                calls[-1]["arguments"] += piece
    for call in calls:
        try:
            call["arguments"] = json.loads(call["arguments"])
        except json.JSONDecodeError:
            call["arguments"] = None
    return answer.strip(), calls


def declared_tools(prompt: str) -> dict[str, dict[str, Any]]:
    """Parameter schemas by tool name, read from the schemas that the rendered prompt lists one a line."""
    tools = {}
    for line in prompt.splitlines():
        if line.startswith('{"name":'):
            tool = json.loads(line)
            tools[tool["name"]] = tool["parameters"]
    return tools


def is_valid_call(call: dict[str, Any], tools: dict[str, dict[str, Any]]) -> bool:
    """A declared tool, all of its required parameters and no undeclared ones."""
    if call["name"] not in tools or not isinstance(call["arguments"], dict):
        return False
    schema = tools[call["name"]]
    given = set(call["arguments"])
    return set(schema.get("required", [])) <= given <= set(schema.get("properties", {}))


def is_right(kind: str, expected: str, answer: str, calls: list[dict[str, Any]]) -> bool:
    """Passage: the key text occurs. Sum: the last number. JSON: equal objects. Tool: equal names and arguments."""
    if kind == "passage":
        wanted = NOT_SAID if expected in NOT_SAID else (expected,)
        return not calls and any(text.lower().rstrip(".") in answer.lower() for text in wanted)
    if kind == "arithmetic":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
        return bool(numbers) and numbers[-1] == expected
    if kind == "tool":
        return calls == json.loads(expected)
    try:
        return json.loads(answer) == json.loads(expected)
    except json.JSONDecodeError:
        return False


def score(llm: LLM, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of right answers by kind, of well-formed and valid tool calls, and the wrong answers."""
    assert llm.tokenizer is not None
    tokenizer = llm.tokenizer
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.generate([record["prompt_ids"] for record in records], params, progress=True)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    well_formed = valid = 0
    wrong: list[dict[str, Any]] = []
    for record, output in zip(records, outputs, strict=True):
        kind = record["kind"]
        answer, calls = parse_output(output.outputs[0].token_ids, tokenizer, record["thinking"])
        asked[kind] += 1
        if kind == "tool" and calls:
            tools = declared_tools(tokenizer.decode(record["prompt_ids"]))
            well_formed += all(isinstance(call["arguments"], dict) for call in calls)
            valid += all(is_valid_call(call, tools) for call in calls)
        if is_right(kind, record["expected"], answer, calls):
            right[kind] += 1
        else:
            wrong.append({"kind": kind, "expected": record["expected"], "answer": answer, "calls": calls})
    kinds = {kind: {"asked": asked[kind], "right": right[kind], "rate": right[kind] / asked[kind]} for kind in asked}
    if asked["tool"]:
        kinds["tool"].update(well_formed_rate=well_formed / asked["tool"], valid_rate=valid / asked["tool"])
    return {"kinds": kinds, "wrong": wrong}


def samples(llm: LLM) -> list[dict[str, str]]:
    """Ten continuations of at most SAMPLE_TOKENS tokens, with the settings the chat command uses by default."""
    assert llm.tokenizer is not None
    tokenizer = llm.tokenizer
    prompts: list[Any] = list(STORY_PROMPTS)
    for text in CHAT_PROMPTS:
        prompts.append(encode_prompt(render_chat([{"role": "user", "content": text}], thinking=False), tokenizer))
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=0, max_tokens=SAMPLE_TOKENS)
    outputs = llm.generate(prompts, params)
    texts = (*STORY_PROMPTS, *CHAT_PROMPTS)
    return [{"prompt": p, "completion": o.outputs[0].text} for p, o in zip(texts, outputs, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompts", type=Path, required=True, help="eval.jsonl of deepinfer.train.data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="answers", help="name of the rates' file; samples come with `answers` only")
    parser.add_argument("--limit", type=int, help="only the first prompts of each kind")
    options = parser.parse_args(arguments)
    records = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    if options.limit:
        seen: Counter[str] = Counter()
        records = [r for r in records if (seen.update([r["kind"]]) or seen[r["kind"]]) <= options.limit]
    llm = LLM(options.model)
    options.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, result: Any) -> None:
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (options.out / f"{name}.json").write_text(text, encoding="utf-8")

    if options.name == "answers":
        write("samples", samples(llm))
    result = score(llm, records)
    write(options.name, result)
    print(json.dumps(result["kinds"], indent=1))


if __name__ == "__main__":
    main()
