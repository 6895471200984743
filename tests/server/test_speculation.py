"""`deepinfer serve` with drafts: the answers are those without, and /metrics counts what became of the drafts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.server.process import MODEL, Server, start_server


def test_a_server_with_drafts(server: Server, checkpoint: Path) -> None:
    options = ("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "3")
    keys = ("--speculative-config.prompt_lookup_min", "1", "--speculative-config.enable_adaptive_verification", "false")
    running = start_server(checkpoint, "--served-model-name", MODEL, *options, *keys)
    try:
        body = {"model": MODEL, "prompt": [5, 6, 7] * 8, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
        plain = server.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        name = "vllm:spec_decode_num_accepted_tokens"
        running.wait_for("deepinfer:generation_tokens_total", 60)
        running.wait_for("deepinfer:num_requests_running", 0)
        # The engine tells its totals about once a second, and when the last request is done.
        by_position = [running.metric(f"{name}_per_pos_total", position=str(position)) for position in range(4)]
        assert sum(by_position) == running.metric(f"{name}_total")
        assert by_position == sorted(by_position, reverse=True) and by_position[3] == 0
        assert by_position[0] <= running.metric("vllm:spec_decode_num_drafts_total") > 0
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)


def test_more_drafts_than_the_head_makes_end_the_server_with_one_line() -> None:
    options = ["--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "30"]
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--port", "0", "--model", "nano", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: num_speculative_tokens must be at most 5, what the draft head makes, got 30" in done.stderr
