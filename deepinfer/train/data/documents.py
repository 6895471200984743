"""All training documents as token ids: text sources, sampled answers as prose and as chat turns, dialogues."""

import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer.recipe.tokenizer import Tokenizer
from deepinfer.train.data.dialogue import Dialogue, chat
from deepinfer.train.data.dialogues import KINDS, make_dialogue
from deepinfer.train.data.sources import Sample

SEED = 1
SYSTEMS = ["You are a helpful assistant.", "You are nano, a small language model.", "Write clear and simple English."]
HELD_OUT_SHARE = 200  # one document in so many, by hash of its text


@dataclass(frozen=True)
class Document:
    """`ids` uint16 [n], BOS first; `targets` bool [n]: False for tokens that are context only (BOS, chat prompts)."""

    source: str
    ids: np.ndarray
    targets: np.ndarray
    size: int  # bytes of the ordinary text in it, for bits per byte
    held_out: bool


def is_held_out(text: str) -> bool:
    """Equal texts fall on the same side, so no document of the held-out set is trained on."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def text_document(source: str, text: str, ids: list[int], tokenizer: Tokenizer, complete: bool = True) -> Document:
    """BOS, text, and EOS where the text really ends."""
    row = [tokenizer.control_id("bos"), *ids] + [tokenizer.control_id("eos")] * complete
    targets = np.ones(len(row), bool)
    targets[0] = False
    return Document(source, np.array(row, np.uint16), targets, len(text.encode()), is_held_out(text))


def answered(ids: list[int], tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens of a rendered prompt an earlier assistant turn wrote: after its think marker, up to EOS."""
    assistant, eos = tokenizer.control_id("assistant"), tokenizer.control_id("eos")
    targets, inside = np.zeros(len(ids), bool), False
    for i, token in enumerate(ids):
        targets[i] = inside and ids[i - 1] != assistant
        if token == assistant:
            inside = True
        elif token == eos:
            inside = False
    return targets


def dialogue_document(source: str, dialogue: Dialogue, tokenizer: Tokenizer) -> Document:
    prompt, completion = dialogue.token_ids(tokenizer)
    targets = np.concatenate([answered(prompt, tokenizer), np.ones(len(completion), bool)])
    text = dialogue.prompt().text + dialogue.completion().text
    return Document(source, np.array(prompt + completion, np.uint16), targets, len(text.encode()), is_held_out(text))


def text_documents(pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[Document]:
    pairs = list(pairs)
    encoded = tokenizer.encode_texts([text for _, text in pairs])
    for (source, text), ids in zip(pairs, encoded, strict=True):
        yield text_document(source, text, ids, tokenizer)


def chat_of(sample: Sample, r: random.Random) -> Dialogue | None:
    """A sampled answer as a chat turn; a cut answer loses its last paragraph so that it can end."""
    answer = sample.answer if sample.complete else "\n\n".join(sample.answer.split("\n\n")[:-1])
    if not answer:
        return None
    system = r.choice(["", "", "", *SYSTEMS])
    return chat("story_chat", r, sample.prompt, answer, f"The user asks: {sample.prompt}", system, think=0.15)


def story_question(sample: Sample, r: random.Random) -> Dialogue | None:
    """Whom the first sentences of a sampled story are about."""
    named = re.search(r"(?:named|called|about) ([A-Z][a-z]+)\b", sample.prompt)
    passage = " ".join(re.findall(r"[^.!?]+[.!?]", sample.answer.split("\n\n")[0])[: r.randint(2, 5)]).strip()
    if not named or named.group(1) not in passage:
        return None
    name = named.group(1)
    question = r.choice(
        ["Who is this text about?", "What is the name of the person in this text?", "Whose story is this?"]
    )
    user = r.choice(["{p}\n\n{q}", "{q}\n\n{p}", "Text: {p}\n\nQuestion: {q}"]).format(p=passage, q=question)
    answer = r.choice(["This text is about {n}.", "The text is about {n}.", "It is about {n}."]).format(n=name)
    return chat("story_question", r, user, answer, f"The text names {name}.")


def sample_documents(samples: list[Sample], tokenizer: Tokenizer) -> Iterator[Document]:
    """Half of the answers as chat turns, the others as prose; some stories also carry a question."""
    prose = []
    for i, sample in enumerate(samples):
        r = random.Random(f"sample-{SEED}-{i}")
        dialogue = chat_of(sample, r) if r.random() < 0.5 else None
        if dialogue:
            yield dialogue_document("story_chat", dialogue, tokenizer)
        else:
            prose.append(sample)
        question = story_question(sample, r) if r.random() < 0.1 else None
        if question:
            yield dialogue_document("story_question", question, tokenizer)
    encoded = tokenizer.encode_texts([sample.answer for sample in prose])
    for sample, ids in zip(prose, encoded, strict=True):
        yield text_document("story", sample.answer, ids, tokenizer, sample.complete)


def dialogue_documents(kind: str, start: int, stop: int, tokenizer: Tokenizer) -> list[Document]:
    return [dialogue_document(kind, make_dialogue(kind, SEED, i), tokenizer) for i in range(start, stop)]


def dialogue_jobs(size: int = 1000) -> list[tuple[str, int, int]]:
    """(kind, start, stop) of all training dialogues, in pieces for worker processes."""
    return [(kind, i, min(i + size, count)) for kind, (_, count) in KINDS.items() for i in range(0, count, size)]


def tokenizer_texts(pairs: list[tuple[str, str]], samples: list[Sample], fraction: int = 4) -> Iterator[str]:
    """Every `fraction`-th text, and some dialogues without their control tokens, to train the tokenizer on."""
    yield from (text for _, text in pairs[::fraction])
    yield from (sample.answer for sample in samples[::fraction])
    for kind, (_, count) in KINDS.items():
        for i in range(0, count, 10 * fraction):
            dialogue = make_dialogue(kind, SEED, i)
            for prompt in (dialogue.prompt(), dialogue.completion()):
                edges = [0, *(edge for span in prompt.control_ranges for edge in span), len(prompt.text)]
                yield from (prompt.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
