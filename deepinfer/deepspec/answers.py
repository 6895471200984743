"""Answers that the target itself writes: through this engine for its own checkpoints, else through `transformers`.

Drafts are trained on what their target says, not on what people wrote. Answers go to a JSON-lines file as they come, so
that a run that was stopped goes on where it was. Its first line says which target wrote them, and how: a run with other
settings does not go on with it.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.files import replace_text
from deepinfer.deepspec.targets import fingerprint, is_v41, load_causal_model
from deepinfer.deepspec.tasks import Prompt

BATCH = 256  # prompts between two writes, and at the same time on a GPU
BATCH_ON_CPU = 64
BATCH_OF_TRANSFORMERS = 32


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. `max_tokens` of each; temperature 0 is greedy."""

    temperature: float = 0.7
    max_tokens: int = 256
    seed: int = 0


Write = Callable[[Sequence[list[int]], Sampling, int], list[list[int]]]  # prompts, sampling, first number -> answers


class EngineWriter:
    """A checkpoint of this project, answered by its engine."""

    group = 1  # every prompt has a random stream of its own

    def __init__(self, folder: Path, device: str) -> None:
        from deepinfer.llm import LLM

        self.llm = LLM(folder, device=device, max_num_seqs=BATCH_ON_CPU if device == "cpu" else BATCH)

    def encode(self, prompt: Prompt, said: Sequence[list[int]] = ()) -> list[int]:
        """Token ids of a prompt or, with the answers `said` to its first turns, of the next turn behind them."""
        from deepinfer.recipe import encode_prompt, render_chat

        if prompt.token_ids:
            return list(prompt.token_ids)
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ValueError("target: it has no tokenizer.json")
        if not prompt.is_chat:
            return [tokenizer.control_id("bos"), *tokenizer.encode_text(prompt.text)]
        messages = conversation(prompt, [tokenizer.decode(i for i in ids if i not in tokenizer.roles) for ids in said])
        return encode_prompt(render_chat(messages, model_version=tokenizer.model_version), tokenizer)

    def write(self, prompts: Sequence[list[int]], sampling: Sampling, first: int) -> list[list[int]]:
        """Answers to prompts number first, first + 1, ..., of which each has its own seed."""
        from deepinfer.params import SamplingParams

        params = [
            SamplingParams(
                temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=sampling.seed + first + i
            )
            for i in range(len(prompts))
        ]
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(prompts, params)]


class HuggingFaceWriter:
    """Any local causal model, answered by `transformers`, prompts padded on the left."""

    group = BATCH_OF_TRANSFORMERS  # prompts that share a random stream

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoTokenizer

        self.model = load_causal_model(folder, device)
        self._tokenizer: Any = None
        self._load_tokenizer = lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, prompt: Prompt, said: Sequence[list[int]] = ()) -> list[int]:
        """As EngineWriter.encode. Without a chat template turns and answers stand in lines of their own."""
        if prompt.token_ids:
            check_tokens(max(prompt.token_ids), self.model.config.get_text_config().vocab_size)
            return list(prompt.token_ids)
        self._tokenizer = self._tokenizer or self._load_tokenizer()
        messages = conversation(prompt, [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in said])
        if prompt.is_chat and self._tokenizer.chat_template:
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        return list(self._tokenizer.encode("\n".join(message["content"] for message in messages)))

    @torch.no_grad()
    def write(self, prompts: Sequence[list[int]], sampling: Sampling, first: int) -> list[list[int]]:
        """Answers to a group of prompts, which draw from one stream; its seed follows from `first`."""
        from transformers import GenerationConfig

        ends = self.model.generation_config.eos_token_id
        how: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        # Not the checkpoint's own: its penalties would make answers that the target alone does not give.
        config = GenerationConfig(max_new_tokens=sampling.max_tokens, eos_token_id=ends, pad_token_id=0, **how)
        last = {ends} if isinstance(ends, int) else set(ends or ())
        answers = []
        for start in range(0, len(prompts), BATCH_OF_TRANSFORMERS):
            part = prompts[start : start + BATCH_OF_TRANSFORMERS]
            torch.manual_seed(sampling.seed + first + start)
            longest = max(map(len, part))
            padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in part])
            pads = torch.tensor([[longest - len(prompt)] for prompt in part])
            mask = (torch.arange(longest) >= pads).long()
            device = self.model.device
            out = self.model.generate(padded.to(device), attention_mask=mask.to(device), generation_config=config)
            answers += [_ended(row, last) for row in out[:, longest:].tolist()]
        return answers


def _ended(ids: list[int], last: set[int]) -> list[int]:
    """`ids` up to the first token of `last`, which stays."""
    end = next((i + 1 for i, token in enumerate(ids) if token in last), len(ids))
    return ids[:end]


def conversation(prompt: Prompt, said: Sequence[str]) -> list[dict[str, str]]:
    """Messages of the first turns of a prompt with their answers, and of the turn after them."""
    turns = (prompt.text, *prompt.later)
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(said, turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return messages


def load_writer(folder: Path, device: str) -> EngineWriter | HuggingFaceWriter:
    """What answers for the checkpoint in `folder`."""
    return EngineWriter(folder, device) if is_v41(folder) else HuggingFaceWriter(folder, device)


def write_answers(
    path: Path,
    prompts: Sequence[list[int]],
    write: Write,
    sampling: Sampling,
    advance: Callable[[int], None] = lambda count: None,
    target: str = "",
    group: int = 1,
) -> list[Answer]:
    """The answers to `prompts`, from `path` where they are, else written there. `target` names who writes them.

    Where only whole groups of prompts are answered alike again, one that was cut off is asked anew: a run that was
    stopped has the answers of one that was not.

    Raises:
        ValueError: the file belongs to another target, other prompts or another sampling.
    """
    settings = {"target": target, **asdict(sampling)}
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_answers(path) if path.is_file() else []
    first = _first_line(path)
    if done and first != settings:
        differ = [name for name, value in settings.items() if first.get(name) != value]
        raise ValueError(f"answers: {path} was written with another {', '.join(differ)}, allowed: a new folder")
    if len(done) > len(prompts) or any(a.prompt != prompt for a, prompt in zip(done, prompts, strict=False)):
        raise ValueError(f"answers: {path} holds answers to other prompts, allowed: a new folder")
    if len(done) < len(prompts):
        done = done[: len(done) // group * group]
        lines = [settings, *map(asdict, done)]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    advance(len(done))
    with path.open("a", encoding="utf-8") as file:
        for start in range(len(done), len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            for prompt, ids in zip(part, write(part, sampling, start), strict=True):
                done.append(Answer([*prompt, *ids], len(ids), sampling.temperature))
                file.write(json.dumps(asdict(done[-1])) + "\n")
            file.flush()
            advance(len(part))
    return done


def answer_tasks(
    folder: Path,
    sets: dict[str, list[Prompt]],
    sampling: Sampling,
    device: str,
    out: Path,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, list[Answer]]:
    """The answers of the target in `folder` to every task set, kept in `out`: one file a set, turn, temperature and
    process.

    Args:
        progress: told what is answered and how many there are; gives what is told how many more are there.
        rank, ranks: which prompts this process asks: every so many-th.
    """
    check_parts(out, ranks)
    writer, target = load_writer(folder, device), fingerprint(folder)
    found: dict[str, list[Answer]] = {}
    part = f".{rank}-of-{ranks}" if ranks > 1 else ""
    for name, prompts in ((name, every[rank::ranks]) for name, every in sets.items()):
        found[name], said = [], [list[list[int]]() for _ in prompts]
        for turn in range(1 + max((len(prompt.later) for prompt in prompts), default=-1)):
            asking = [i for i, prompt in enumerate(prompts) if len(prompt.later) >= turn]
            path = out / f"{name}{f'-turn{turn + 1}' if turn else ''}-t{sampling.temperature:g}{part}.jsonl"
            with progress(f"answers to {path.stem}", len(asking)) as advance:
                ids = [writer.encode(prompts[i], said[i]) for i in asking]
                answers = write_answers(path, ids, writer.write, sampling, advance, target, writer.group)
            for i, answer in zip(asking, answers, strict=True):
                said[i].append(answer.token_ids[len(answer.prompt) :])
            found[name] += answers
    del writer  # the engine's memory is wanted for what comes
    gc.collect()
    return found


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file; a last line that was cut off is left out and removed.

    Raises:
        ValueError: a line is neither an answer nor, if it is the first, the settings.
    """
    answers, whole = [], 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not a JSON object")
                if number > 1 or "token_ids" in record:
                    answers.append(_as_answer(record))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"answers: {path}, line {number}: {what}") from None
        if whole < path.stat().st_size:
            file.truncate(whole)
    return answers


def _as_answer(record: Any) -> Answer:
    ids, count, temperature = record["token_ids"], record["num_answer"], record["temperature"]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("token_ids must be a list of token ids")
    if type(count) is not int or not 0 <= count <= len(ids):
        raise ValueError(f"num_answer must be a number of its {len(ids)} token ids")
    if type(temperature) not in (int, float) or not 0 <= temperature < float("inf"):
        raise ValueError("temperature must be a number, at least 0")
    return Answer(ids, count, float(temperature))


def read_folder(data: Path, target: str = "") -> list[Answer]:
    """All answers in a folder that `deepspec prepare` wrote, in the order of their files' names.

    Args:
        target: the fingerprint of who must have written them; "" takes anybody's.

    Raises:
        ValueError: there are none, or another target wrote them.
    """
    files = sorted((data / "answers").glob("*.jsonl"))
    answers = [answer for file in files for answer in read_answers(file)]
    if not answers:
        raise ValueError(f"data: no answers in {data}, allowed: a folder that `deepinfer deepspec prepare` wrote")
    for file in files if target else ():
        if _first_line(file).get("target") not in (None, "", target):
            raise ValueError(f"data: another target wrote {file}, allowed: the answers of the one that is drafted for")
    return answers


def check_parts(folder: Path, ranks: int) -> None:
    """That what lies in `folder` was begun by as many processes: others share the prompts in another way.

    Raises:
        ValueError: it was not.
    """
    for path in folder.glob("*.jsonl"):
        share = re.search(r"\.\d+-of-(\d+)\.jsonl$", path.name)
        begun = int(share[1]) if share else 1
        if begun != ranks:
            raise ValueError(f"out: {path} was begun by {begun} processes, allowed: as many, or a new folder")


def check_tokens(highest: int, vocab_size: int) -> None:
    """That a target knows the tokens of its rows.

    Raises:
        ValueError: it does not.
    """
    if highest >= vocab_size:
        raise ValueError(f"data: token id {highest}, allowed: below {vocab_size}, the target's vocabulary")


def _first_line(path: Path) -> dict[str, Any]:
    """The settings that a file of answers begins with."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return dict(json.loads(line)) if line else {}
