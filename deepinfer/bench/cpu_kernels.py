"""`python -m deepinfer.bench.cpu_kernels`: nano's decode rate on this CPU with the C kernels and without them.

Both run in processes of their own, turn by turn, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from deepinfer.bench import results
from deepinfer.bench.decode import measure_batch
from deepinfer.bench.synthetic import benchmark_engine, benchmark_model
from deepinfer.config.engine import EngineConfig

PROMPT, STEPS = 128, 40
BATCHES = (1, 16)
MODES = {"C kernels": "auto", "pure PyTorch": "reference"}


def decode_rates() -> list[float]:
    """Tokens a second of each batch size, in this process."""
    config = EngineConfig(max_num_seqs=max(BATCHES), max_model_len=PROMPT + STEPS + 64)
    engine = benchmark_engine(benchmark_model("nano", "cpu"), config)
    return [measure_batch(engine, batch, PROMPT, STEPS, seed).decode for seed, batch in enumerate(BATCHES, 1)]


def measure(rounds: int, threads: int) -> list[results.Record]:
    """Medians over `rounds` processes of each kind."""
    rates: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, kernels in MODES.items():
            environment = {**os.environ, "DEEPINFER_KERNELS": kernels, "OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, "-m", "deepinfer.bench.cpu_kernels", "--worker"]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            rates[mode].append([float(word) for word in answer.stdout.split()])
    records = []
    for index, batch in enumerate(BATCHES):
        ours, theirs = ([run[index] for run in rates[mode]] for mode in MODES)
        records.append(
            results.measured(
                f"nano decode, batch {batch}, C kernels", part="4C", unit="tok/s", value=statistics.median(ours),
                command="python -m deepinfer.bench.cpu_kernels --save", baseline_name="pure PyTorch",
                baseline_value=statistics.median(theirs), target=1.6, samples=ours,
                device=f"{results.cpu_name()}, {threads} thread" + "s" * (threads > 1),
            )
        )  # fmt: skip
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="print the rates of this process (for the parent)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each (default 1)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_kernels.json")
    options = parser.parse_args()
    if options.worker:
        print(*decode_rates())
        return
    records = measure(options.rounds, options.threads)
    for one in records:
        print(f"{one.name}: {one.value:.1f} {one.unit} ({one.ratio:.2f} x {one.baseline_name})")
    if options.save:
        results.save("cpu_kernels", records, Path("benchmarks/results"))


if __name__ == "__main__":
    main()
