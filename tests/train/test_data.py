"""Training data: valid dialogues, an exact tokenizer, rows without leakage, a baseline that is a distribution."""

import json
import random
import re

import numpy as np
import pytest

from deepinfer.recipe.control_tokens import CONTROL_TOKENS
from deepinfer.recipe.events import ToolCallArguments, ToolCallStart
from deepinfer.recipe.request import ParsingOptions
from deepinfer.recipe.stream_parser import StreamParser
from deepinfer.recipe.tokenizer import Tokenizer
from deepinfer.train import ngram_baseline
from deepinfer.train.data import documents as docs
from deepinfer.train.data.arithmetic import arithmetic, in_evaluation
from deepinfer.train.data.dialogues import KINDS, make_dialogue
from deepinfer.train.data.evaluation import evaluation_dialogues
from deepinfer.train.data.pack import LENGTH, pack
from deepinfer.train.data.tokenizer import VOCAB_SIZE, train_tokenizer
from deepinfer.train.data.tool_table import HELD_OUT_TOOLS
from deepinfer.train.data.words import HELD_OUT_NAMES


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Trained on invented words, so that the test needs no data."""
    r = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join("".join(r.choices(letters, k=r.randint(2, 9))) for _ in range(400)) for _ in range(40)]
    return Tokenizer(train_tokenizer(texts))


@pytest.mark.parametrize("kind", KINDS)
def test_dialogues_are_reproducible_and_end_with_eos(kind: str) -> None:
    for i in range(30):
        dialogue = make_dialogue(kind, 5, i)
        assert dialogue == make_dialogue(kind, 5, i)
        assert dialogue.prompt().control_roles[0] == "bos"
        assert dialogue.prompt().control_roles[-1] == ("think_start" if dialogue.thinking else "think_end")
        assert dialogue.completion().control_roles[-1] == "eos"


def test_json_answers_hold_the_asked_keys() -> None:
    for i in range(50):
        dialogue = make_dialogue("json", 5, i)
        answer = json.loads(str(dialogue.messages[-1].content))
        request = str(dialogue.messages[-2].content)
        assert answer and all(key in request for key in answer)


def test_tool_calls_parse_to_a_declared_tool_with_its_required_arguments() -> None:
    for i in range(50):
        dialogue = make_dialogue("tool_call", 5, i)
        text = dialogue.completion().text.removesuffix(CONTROL_TOKENS["eos"])
        stage = "ReasoningStart" if dialogue.thinking else None
        parser = StreamParser(ParsingOptions(parse_tool_calls=True, thinking_initial_stage=stage))
        events = [*parser.push(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        arguments = json.loads("".join(e.text for e in events if isinstance(e, ToolCallArguments)))
        (wanted,) = json.loads(dialogue.expected)
        assert [wanted["name"]] == names
        assert wanted["arguments"] == arguments
        (tool,) = [tool for tool in dialogue.tools if tool.name == names[0]]
        assert set(tool.parameters["required"]) <= set(arguments) <= set(tool.parameters["properties"])


def test_arithmetic_is_right_and_keeps_its_evaluation_pairs_apart() -> None:
    for held_out in (False, True):
        for i in range(100):
            dialogue = arithmetic(random.Random(i), held_out)
            user = str(dialogue.messages[-2].content)
            for sign, operation in (("plus", "+"), ("minus", "-"), ("times", "*"), (" x ", " * ")):
                user = user.replace(sign, operation)
            found = re.search(r"(\d+) ([-+*]) (\d+)", user)
            if found:
                a, b = int(found[1]), int(found[3])
                assert {"+": a + b, "-": a - b, "*": a * b}[found[2]] == int(dialogue.expected)
                assert in_evaluation(a, b) == held_out


def test_evaluation_uses_names_and_tools_that_training_never_does() -> None:
    for dialogue in evaluation_dialogues():
        if dialogue.kind == "passage":
            assert any(name in str(dialogue.messages) for name in HELD_OUT_NAMES)
    for i in range(200):
        assert not HELD_OUT_TOOLS & {tool.name for tool in make_dialogue("tool", docs.SEED, i).tools}
        assert not any(f"{name} " in str(make_dialogue("passage", docs.SEED, i).messages) for name in HELD_OUT_NAMES)


def test_tokenizer_has_the_control_tokens_in_place_and_round_trips(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert [tokenizer.control_id(role) for role in ("bos", "eos", "pad")] == [0, 1, 2]
    assert set(tokenizer.control_ids) == set(CONTROL_TOKENS)
    assert all(i < 3 or i >= VOCAB_SIZE - 24 for i in tokenizer.control_ids.values())
    for text in ("Hello, world! 12345", "naïve 東京 ﬁ 😀\r\n\tx", CONTROL_TOKENS["user"]):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & tokenizer.added_ids


def test_targets_are_exactly_what_the_assistant_wrote(tokenizer: Tokenizer) -> None:
    for i in range(20):
        dialogue = make_dialogue("memory", 5, i)
        document = docs.dialogue_document("memory", dialogue, tokenizer)
        learnt = tokenizer.decode(document.ids[document.targets].tolist())
        answers = [str(m.content) for m in dialogue.messages if m.role == "assistant"]
        if dialogue.thinking:
            answers[-1] = f"{dialogue.messages[-1].reasoning_content}</think>{answers[-1]}"
        assert learnt == "".join(answer + CONTROL_TOKENS["eos"] for answer in answers)


def test_rows_hold_every_training_document_whole_and_no_held_out_one(tokenizer: Tokenizer) -> None:
    r = random.Random(1)
    pairs = [("text", f"number {i} " + "word " * r.randint(1, 900)) for i in range(400)]
    documents = list(docs.text_documents(pairs, tokenizer))
    train, held_out = ([d for d in documents if d.held_out == side] for side in (False, True))
    assert held_out
    rows, targets = pack(train, train, seed=3)
    again, _ = pack(train, train, seed=3)
    assert (rows == again).all() and rows.shape[1] == LENGTH and not targets[rows == 0].any()
    packed = b"".join(row.tobytes() for row in rows)
    assert all(d.ids.tobytes() in packed for d in train if len(d.ids) <= LENGTH)
    assert not any(d.ids.tobytes() in packed for d in held_out)


def test_ngram_probabilities_sum_to_one() -> None:
    r = np.random.default_rng(0)
    levels = ngram_baseline.fit(r.integers(0, 20, (30, 50)))
    for context in ([3, 4, 5], [19, 0, 1], [25, 25, 25]):
        tokens = [[*context, last] for last in range(32)]
        total = sum(float(ngram_baseline.probabilities(levels, np.array(t), 32)[0]) for t in tokens)
        assert total == pytest.approx(1.0)
