"""Answers that the target itself writes: through this engine for its own checkpoints, else through `transformers`.

Drafts are trained on what their target says, not on what people wrote. Answers go to a JSON-lines file as they come, so
that a run that was stopped goes on where it was. Its first line says which target wrote them, and how: a run with other
settings does not go on with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.targets import is_v41
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

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model, self.folder = model.to(device).eval(), folder
        self._tokenizer: Any = None
        self._load_tokenizer = lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, prompt: Prompt, said: Sequence[list[int]] = ()) -> list[int]:
        """As EngineWriter.encode. Without a chat template turns and answers stand in lines of their own."""
        if prompt.token_ids:
            return list(prompt.token_ids)
        self._tokenizer = self._tokenizer or self._load_tokenizer()
        messages = conversation(prompt, [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in said])
        if prompt.is_chat and self._tokenizer.chat_template:
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        return list(self._tokenizer.encode("\n".join(message["content"] for message in messages)))

    @torch.no_grad()
    def write(self, prompts: Sequence[list[int]], sampling: Sampling, first: int) -> list[list[int]]:
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
) -> list[Answer]:
    """The answers to `prompts`, from `path` where they are, else written there. `target` names who writes them.

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
    advance(len(done))
    if not done:
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for start in range(len(done), len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            for prompt, ids in zip(part, write(part, sampling, start), strict=True):
                done.append(Answer([*prompt, *ids], len(ids), sampling.temperature))
                file.write(json.dumps(asdict(done[-1])) + "\n")
            file.flush()
            advance(len(part))
    return done


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file; a last line that was cut off is left out and removed."""
    answers, whole = [], 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            record = json.loads(line)
            if "token_ids" in record:  # else the settings
                answers.append(Answer(**record))
        file.truncate(whole)
    return answers


def read_folder(data: Path) -> list[Answer]:
    """All answers in a folder that `deepspec prepare` wrote, in the order of their files' names.

    Raises:
        ValueError: there are none.
    """
    files = sorted((data / "answers").glob("*.jsonl"))
    if not files:
        raise ValueError(f"data: no answers in {data}, allowed: a folder that `deepinfer deepspec prepare` wrote")
    return [answer for file in files for answer in read_answers(file)]


def _first_line(path: Path) -> dict[str, Any]:
    """The settings that a file of answers begins with."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return dict(json.loads(line)) if line else {}
