"""`deepinfer bench speculation`: decoding with and without drafts, the same requests, batch by batch.

Engines over one checkpoint, without drafts, with drafts whose number follows the decode curve, and with a fixed number,
answer the same greedy requests. The time runs from the first decode step until the first sequence of the batch ends, so
that the batch is whole all the time; a round has several batches, one after the other, so that there are prompts of all
kinds in it. Outputs must be the same tokens; on a GPU, where the number of rows may tip a token, the share that is the
same is printed.

Whatever else the machine does must meet all engines alike. On a CPU they take turns of a few steps, and with one thread
the time is that of the process; on a GPU, where a step goes on while the host turns to another engine, they take turns
of whole batches. Who begins changes from turn to turn.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepinfer.bench import results
from deepinfer.bench.decode import synchronize
from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.engine.engine import Engine
from deepinfer.llm import LLM
from deepinfer.params import SamplingParams
from deepinfer.recipe.tokenizer import Tokenizer

AREA = "speculation"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Beginnings of the kinds that a model is used for: prose, code, and text that repeats its prompt.
PROMPTS = (
    "Once upon a time there was a little girl who lived near the forest. One day she",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\ndef variance(values):\n",
    "The sun is a star. The sun is very big and very hot. The earth goes around the sun. The moon goes around",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41, "city": "Leeds"}\n{"name": "Grace",',
)
FEWEST_PROMPTS, FEWEST_BATCHES = 12, 2  # of a round
CPU_TURN = 8  # steps
SETTINGS = {"off": None, "variable": True, "fixed": False}  # variable_length


@dataclass
class Run:
    """What one engine did with the batches of one size in one round."""

    num_tokens: int = 0
    seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)  # by prompt
    drafts: float = 0.0
    accepted: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens of a sequence a round with drafts, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class Decoding:
    """One engine answering one batch. All prompts are prefilled when it is made; requests are gone when it is done."""

    def __init__(self, engine: Engine, prompts: list[list[int]], max_tokens: int, run: Run) -> None:
        self.engine, self.run, self.done = engine, run, False
        self.outputs: list[list[int]] = [[] for _ in prompts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        while not self.done and (engine.scheduler.waiting or engine.scheduler.prefilling):
            self._step()
        if self.done:
            self._end()

    def go_on(self, num_steps: int) -> None:
        """Up to so many steps, counted and timed, until the first sequence ends."""
        if self.done:
            return
        device = self.engine.config.device
        clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        synchronize(device)
        start, before = clock(), sum(map(len, self.outputs))
        while num_steps and not self.done:
            self._step()
            num_steps -= 1
        synchronize(device)
        self.run.seconds += clock() - start
        self.run.num_tokens += sum(map(len, self.outputs)) - before
        if self.done:
            self._end()

    def _end(self) -> None:
        for number in range(len(self.outputs)):
            self.engine.abort_request(str(number))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise ValueError(f"bench: a request failed: {output.error}")
            for completion in output.outputs:
                self.outputs[int(output.request_id)] += completion.token_ids
            self.done |= output.finished


def decode_round(engines: dict[str, Engine], batches: list[list[list[int]]], max_tokens: int) -> dict[str, Run]:
    """All engines answer all batches once, taking turns."""
    runs = {name: Run() for name in engines}
    before = {name: _draft_totals(engine) for name, engine in engines.items()}
    for number, prompts in enumerate(batches):
        order = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        on_cpu = engines[order[0]].config.device == "cpu"
        made: dict[str, Decoding] = {}
        for name in order:
            made[name] = Decoding(engines[name], prompts, max_tokens, runs[name])
            if not on_cpu:
                made[name].go_on(max_tokens)
        while not all(decoding.done for decoding in made.values()):
            for name in order:
                made[name].go_on(CPU_TURN)
            order.append(order.pop(0))
        for name, decoding in made.items():
            runs[name].outputs += decoding.outputs
    for name, engine in engines.items():
        totals = _draft_totals(engine)
        runs[name].drafts, runs[name].accepted = (now - then for now, then in zip(totals, before[name], strict=True))
    return runs


def _draft_totals(engine: Engine) -> tuple[float, float]:
    totals = engine.observer.stats.totals
    return totals.get("drafts", 0.0), totals.get("accepted", 0.0)


def measure(
    engines: dict[str, Engine], batches: list[list[list[int]]], max_tokens: int, rounds: int
) -> dict[str, list[Run]]:
    """Rounds of all engines; a shorter one in front, which is not counted, warms up."""
    decode_round(engines, batches, max_tokens // 2)
    made = [decode_round(engines, batches, max_tokens) for _ in range(rounds)]
    return {name: [runs[name] for runs in made] for name in engines}


def prompts_of(folder: Path | None, tokenizer: Tokenizer) -> list[list[int]]:
    """The `prompt_ids` of the .jsonl files in a folder, of each in turn; without one, beginnings of our own."""
    if folder is None:
        count = max(BATCHES)  # no two alike: each starts with the others' number of words dropped
        texts = [" ".join(PROMPTS[i % len(PROMPTS)].split(" ")[i // len(PROMPTS) % 8 :]) for i in range(count)]
        return [tokenizer.encode_text(text) for text in texts]
    kinds = [[json.loads(line)["prompt_ids"] for line in path.open()] for path in sorted(folder.glob("*.jsonl"))]
    if not kinds:
        raise ValueError(f"prompts: no .jsonl file in {folder}")
    return list(chain.from_iterable(zip(*kinds, strict=False)))


def batches_of(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of one size; prompts that are too few come again."""
    count = max(-(-FEWEST_PROMPTS // size), FEWEST_BATCHES)
    repeated = [prompts[i % len(prompts)] for i in range(count * size)]
    return [repeated[begin : begin + size] for begin in range(0, len(repeated), size)]


def records_of(runs: dict[str, list[Run]], method: str, name: str, batch: int, command: str, device: str) -> list:
    """Speculation against none, and its chosen lengths against fixed ones."""
    medians = {setting: median(run.tokens_per_second for run in of_setting) for setting, of_setting in runs.items()}
    hardware = None if device != "cpu" else results.cpu_device_name()
    samples = [
        {
            "setting": setting,
            "tokens_per_second": [run.tokens_per_second for run in of_setting],
            "accepted_length": median(run.accepted_length for run in of_setting),
        }
        for setting, of_setting in runs.items()
    ]
    common: dict[str, Any] = {"part": "5", "unit": "tok/s", "command": command, "samples": samples, "device": hardware}
    made = [
        results.measured(
            f"decode with {method} drafts, batch {batch} ({name})",
            value=medians["variable"],
            baseline_name="no drafts",
            baseline_value=medians["off"],
            target=(1.4 if batch == 1 else 0.97) if method == "dspark" else 0.97,
            **common,
        )
    ]
    if "fixed" in runs:
        made.append(
            results.measured(
                f"decode with {method} drafts, batch {batch}: lengths by the curve ({name})",
                value=medians["variable"],
                baseline_name="fixed length",
                baseline_value=medians["fixed"],
                target=1.0 if batch >= 16 else None,
                **common,
            )
        )
    return made


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deepinfer bench speculation",
        description=__doc__,
        epilog="Example: `deepinfer bench speculation --method dspark --prompts benchmarks/nano/draft_prompts`",
    )
    parser.add_argument("--model", default="nano", help="nano or a checkpoint folder (default nano)")
    parser.add_argument("--method", choices=("ngram", "dspark"), default="ngram", help="what drafts (default ngram)")
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="most drafts of a step (default 5)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="batch sizes (default 1 to 64)")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl files with prompt_ids (default: our own)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all engines, alternating (default 3)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--quick", action="store_true", help="one short round of batches 1 and 4; nothing is saved")
    options = parser.parse_args(arguments)
    batches, rounds, max_tokens = options.batches, options.rounds, options.max_tokens
    if options.quick:
        batches, rounds, max_tokens = (1, 4), 1, 16
    command = " ".join(["deepinfer bench speculation", *arguments])
    models = {}
    for setting, variable in SETTINGS.items():
        speculative = None
        if variable is not None:
            speculative = SpeculativeConfig(
                method=options.method,
                num_speculative_tokens=options.num_speculative_tokens,
                variable_length=variable,
            )
        config = EngineConfig(
            max_num_seqs=max(batches), max_model_len=1024, device=options.device, speculative_config=speculative
        )
        models[setting] = LLM(options.model, config)
    engines, tokenizer = {setting: llm.engine for setting, llm in models.items()}, models["off"].tokenizer
    if tokenizer is None:
        parser.error(f"--model {options.model} has no tokenizer")
    prompts, made = prompts_of(options.prompts, tokenizer), []
    for batch in batches:
        runs = measure(engines, batches_of(prompts, batch), max_tokens, rounds)
        pairs = list(zip(runs["off"][-1].outputs, runs["variable"][-1].outputs, strict=True))
        same = sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)
        made += records_of(runs, options.method, options.model, batch, command, options.device)
        figures = ", ".join(
            f"{setting} {median(run.tokens_per_second for run in of_setting):,.1f} tok/s "
            f"({median(run.accepted_length for run in of_setting):.2f} a round)"
            for setting, of_setting in runs.items()
        )
        print(f"batch {batch}: {figures}; {same} of {len(pairs)} outputs are the same", flush=True)
    if not options.quick:
        print(f"wrote {results.save(AREA, made)}")
