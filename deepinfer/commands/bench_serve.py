"""`deepinfer bench serve`: load on an OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.commands import options


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


SERVER, WORKLOAD, LOAD, SAMPLING, REPORT = "Server", "Workload", "Load", "Sampling", "Report"


def register(app: typer.Typer) -> None:
    app.command(
        context_settings={"allow_extra_args": True},  # as in vLLM: `--goodput ttft:500 tpot:50`
        epilog=options.examples(
            "deepinfer bench serve --random-input-len 512 --random-output-len 64 --ignore-eos",
            "deepinfer bench serve --request-rate 4 --burstiness 0.5 --num-prompts 200 --goodput ttft:500 tpot:50",
            "deepinfer bench serve --base-url http://host:30000 --backend openai-chat --max-concurrency 32",
            "deepinfer bench serve --dataset-name sharegpt --dataset-path sharegpt.json --tokenizer ./model",
            "deepinfer bench serve --dataset-name timed_trace --dataset-path trace.jsonl --output-json run.json",
            "deepinfer bench serve --dataset-name prefix_repetition --prefix-repetition-num-prefixes 4",
        ),
    )(serve)


def serve(
    context: typer.Context,
    base_url: Annotated[str | None, _option(SERVER, help="Server; default: http://HOST:PORT.")] = None,
    host: Annotated[str, _option(SERVER, help="Server's address.")] = "127.0.0.1",
    port: Annotated[int, _option(SERVER, help="Server's port.")] = 8000,
    backend: Annotated[
        str, _option(SERVER, help="openai (completions) or openai-chat; also vllm, sglang, sglang-oai-chat.")
    ] = "openai",
    endpoint: Annotated[str | None, _option(SERVER, help="Path; default: the backend's.")] = None,
    model: Annotated[str | None, _option(SERVER, "--model", "-m", help="Default: first of /v1/models.")] = None,
    api_key: Annotated[
        str | None, _option(SERVER, envvar=["DEEPINFER_API_KEY", "OPENAI_API_KEY"], help="Sent as bearer token.")
    ] = None,
    timeout: Annotated[float, _option(SERVER, help="Seconds that a whole request may take.")] = 600.0,
    dataset_name: Annotated[
        str,
        _option(
            WORKLOAD,
            help="random, random-ids, prefix_repetition, sharegpt, sonnet, spec_bench, burstgpt, custom, timed_trace.",
        ),
    ] = "random",
    dataset_path: Annotated[
        Path | None, _option(WORKLOAD, exists=True, dir_okay=False, help="File of a dataset that is one.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(WORKLOAD, help="tokenizer.json, its folder, or nano: prompts get exact lengths; default: estimates."),
    ] = None,
    num_prompts: Annotated[
        int | None, _option(WORKLOAD, min=1, help="Requests; default: 100, or all of the file.")
    ] = None,
    seed: Annotated[int, _option(WORKLOAD, min=0, help="Same seed, same requests and arrivals.")] = 0,
    num_warmups: Annotated[
        int,
        _option(WORKLOAD, "--num-warmups", "--warmup-requests", min=0, help="Requests before measuring starts."),
    ] = 1,
    flush_cache: Annotated[
        bool, _option(WORKLOAD, "--flush-cache", help="Clear the server's prefix cache before measuring starts.")
    ] = False,
    random_input_len: Annotated[
        int, _option(WORKLOAD, "--random-input-len", "--input-len", min=1, help="Mean tokens of a prompt.")
    ] = 1024,
    random_output_len: Annotated[
        int, _option(WORKLOAD, "--random-output-len", "--output-len", min=1, help="Mean tokens of an answer.")
    ] = 128,
    random_range_ratio: Annotated[
        float, _option(WORKLOAD, help="Lengths vary by this share of the mean to both sides, [0, 1).")
    ] = 0.0,
    prefix_repetition_num_prefixes: Annotated[int, _option(WORKLOAD, min=1, help="Different prefixes.")] = 10,
    prefix_repetition_prefix_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens of a prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens after it.")] = 256,
    prefix_repetition_output_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens of an answer.")] = 128,
    sharegpt_output_len: Annotated[
        int | None, _option(WORKLOAD, min=1, help="Tokens of an answer; default: as in the file.")
    ] = None,
    custom_output_len: Annotated[
        int | None, _option(WORKLOAD, min=1, help="Tokens of an answer; default: the file's output_tokens, else 256.")
    ] = None,
    sonnet_prefix_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens that all prompts share.")] = 200,
    sonnet_input_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens of a prompt.")] = 550,
    sonnet_output_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens of an answer.")] = 150,
    spec_bench_output_len: Annotated[int, _option(WORKLOAD, min=1, help="Tokens of an answer.")] = 256,
    spec_bench_category: Annotated[str | None, _option(WORKLOAD, help="Its questions alone; default: all.")] = None,
    timed_trace_sec_multiplier: Annotated[
        float, _option(WORKLOAD, help="Seconds of one unit of the trace's timestamps; 0.0005 replays ms twice as fast.")
    ] = 0.001,
    timed_trace_chunk_hash_size: Annotated[
        int, _option(WORKLOAD, min=1, help="Tokens that one of the trace's hash_ids stands for.")
    ] = 512,
    request_rate: Annotated[
        float | None, _option(LOAD, help="Requests a second; default: the trace's times, else inf (all at once).")
    ] = None,
    burstiness: Annotated[
        float, _option(LOAD, help="Gamma shape of the gaps: 1 Poisson, less burstier, inf a constant rate.")
    ] = 1.0,
    ramp_up_strategy: Annotated[
        str | None, _option(LOAD, help="linear or exponential: the rate grows over the run.")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, _option(LOAD, min=0.001, help="Requests a second at first.")] = None,
    ramp_up_end_rps: Annotated[float | None, _option(LOAD, min=0.001, help="Requests a second at the end.")] = None,
    max_concurrency: Annotated[int | None, _option(LOAD, min=1, help="Most requests at the same time.")] = None,
    ignore_eos: Annotated[bool, _option(SAMPLING, "--ignore-eos", help="Answers of exactly the asked length.")] = False,
    temperature: Annotated[float, _option(SAMPLING, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, _option(SAMPLING, help="Sent if given.")] = None,
    top_k: Annotated[int | None, _option(SAMPLING, help="Sent if given.")] = None,
    min_p: Annotated[float | None, _option(SAMPLING, help="Sent if given.")] = None,
    extra_body: Annotated[
        str,
        _option(
            SAMPLING, "--extra-body", "--extra-request-body", help='More request fields as JSON, e.g. {"top_k": 5}.'
        ),
    ] = "{}",
    goodput: Annotated[
        list[str] | None, _option(REPORT, help="Limits in ms that a good request keeps: ttft:500 tpot:50 e2el:9000.")
    ] = None,
    metric_percentiles: Annotated[str, _option(REPORT, help="Percentiles of the latencies.")] = "90,99",
    percentile_metrics: Annotated[str, _option(REPORT, help="Latencies to print.")] = "ttft,tpot,itl,e2el",
    output_json: Annotated[Path | None, _option(REPORT, dir_okay=False, help="Write the figures to this file.")] = None,
    output_file: Annotated[
        Path | None, _option(REPORT, dir_okay=False, help="Add them to this file, a line of JSON each run.")
    ] = None,
    append_result: Annotated[
        bool, _option(REPORT, "--append-result", help="Add a line to the file of --output-json or --save-result.")
    ] = False,
    label: Annotated[str | None, _option(REPORT, help="Name of the run, for the file.")] = None,
    save_result: Annotated[bool, _option(REPORT, "--save-result", help="Write them to a file named by date.")] = False,
    save_detailed: Annotated[
        bool, _option(REPORT, "--save-detailed", "--output-details", help="Also every request's samples in that file.")
    ] = False,
    result_filename: Annotated[
        str | None, _option(REPORT, help="Name of the file of --save-result; default: by backend, model and date.")
    ] = None,
    result_dir: Annotated[Path, _option(REPORT, file_okay=False, help="Folder of --save-result.")] = Path("."),
    metadata: Annotated[list[str] | None, _option(REPORT, help="KEY=VALUE for the file; may be repeated.")] = None,
    record: Annotated[
        str | None, _option(REPORT, help="Keep the figures under this name in benchmarks/results/serve.json.")
    ] = None,
    no_progress: Annotated[bool, _option(REPORT, "--no-progress", "--disable-tqdm", help="No progress bar.")] = False,
) -> None:
    """Load any OpenAI-compatible server, and report throughput, TTFT, TPOT, ITL, end-to-end latency and goodput."""
    from deepinfer.bench import results
    from deepinfer.bench import serve as benchmark
    from deepinfer.bench.serve_report import parse_goodput, parse_metrics, parse_percentiles

    if context.args and not goodput:
        raise ValueError(f"unexpected argument {context.args[0]!r}")
    percentiles = parse_percentiles(metric_percentiles)
    shown = parse_metrics(percentile_metrics)
    sampling = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    sent = {name: value for name, value in sampling.items() if value is not None}
    settings = benchmark.Settings(
        base_url=base_url or f"http://{host}:{port}",
        backend=backend,
        endpoint=endpoint,
        model=model,
        api_key=api_key,
        timeout=timeout,
        dataset_name=dataset_name,
        dataset_path=dataset_path,
        tokenizer=tokenizer,
        num_prompts=num_prompts,
        seed=seed,
        num_warmups=num_warmups,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        prefix_repetition_num_prefixes=prefix_repetition_num_prefixes,
        prefix_repetition_prefix_len=prefix_repetition_prefix_len,
        prefix_repetition_suffix_len=prefix_repetition_suffix_len,
        prefix_repetition_output_len=prefix_repetition_output_len,
        sharegpt_output_len=sharegpt_output_len,
        custom_output_len=custom_output_len,
        sonnet_prefix_len=sonnet_prefix_len,
        sonnet_input_len=sonnet_input_len,
        sonnet_output_len=sonnet_output_len,
        spec_bench_output_len=spec_bench_output_len,
        spec_bench_category=spec_bench_category,
        timed_trace_sec_multiplier=timed_trace_sec_multiplier,
        timed_trace_chunk_hash_size=timed_trace_chunk_hash_size,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        temperature=temperature,
        ramp_up_strategy=ramp_up_strategy,
        ramp_up_start_rps=ramp_up_start_rps,
        ramp_up_end_rps=ramp_up_end_rps,
        extra_body=sent | _json_object(extra_body),
        goodput=parse_goodput([*(goodput or ()), *context.args]),
        percentiles=tuple(percentiles),
        metadata=_pairs(metadata or []),
        flush_cache=flush_cache,
        label=label,
    )
    try:
        summary, load = benchmark.run_with_progress(settings, show_progress=not no_progress)
    except benchmark.ServerUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    benchmark.print_table(summary, percentiles, shown)
    if save_result and output_json is None:
        name = f"{settings.backend}-{summary['model_id'].replace('/', '_')}-{summary['date']}.json"
        output_json = result_dir / (result_filename or name)
    for path, append in ((output_json, append_result), (output_file, True)):
        if path is not None:
            benchmark.write_json(path, summary, load if save_detailed else None, append)
            print(f"wrote {path}")
    if record is not None:
        saved = results.save(benchmark.AREA, benchmark.result_records(record, summary, _command_line()))
        print(f"wrote {saved}")
    raise typer.Exit(1 if summary["completed"] == 0 else 0)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body must be a JSON object, got {text!r}")
    return value


def _pairs(entries: list[str]) -> dict[str, str]:
    pairs = dict(entry.partition("=")[::2] for entry in entries)
    if not all("=" in entry and not entry.startswith("=") for entry in entries):
        raise ValueError(f"--metadata must be KEY=VALUE, got {entries}")
    return pairs


def _command_line() -> str:
    """As it was typed, without the API key."""
    words = ["deepinfer", *sys.argv[1:]]
    for number, word in enumerate(words):
        if word.startswith("--api-key="):
            words[number] = "--api-key=..."
        elif words[number - 1] == "--api-key":
            words[number] = "..."
    return " ".join(words)
