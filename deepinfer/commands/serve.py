"""`deepinfer serve`: the HTTP server."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.commands import options
from deepinfer.commands.parsing import JSON_OPTIONS, OptionCommand
from deepinfer.commands.units import parse_bytes
from deepinfer.observability.log_format import FORMATS

ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def register(app: typer.Typer) -> None:
    app.command(
        cls=OptionCommand,
        epilog=options.examples(
            "deepinfer serve",
            "deepinfer serve --model nano --port 8000 --api-key secret --max-model-len 2K",
            "deepinfer serve --config examples/server.yaml",
            "deepinfer serve --help=log      # the options that have this in name or text; --help=all: every option",
        ),
    )(serve)


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults, so that options on the command line win over it."""
    if path is None or context.resilient_parsing:
        return path
    parameters = {parameter.name: parameter for parameter in context.command.params if parameter.name != "config"}
    values = {str(name).replace("-", "_"): value for name, value in read_config(path).items()}
    for name, value in values.items():
        if name not in parameters:
            raise ValueError(f"--config {path}: unknown option {name!r}; known are {', '.join(sorted(parameters))}")
        values[name] = check_value(path, name, value, parameters[name], context)
    context.default_map = {**(context.default_map or {}), **values}
    return path


def check_value(path: Path, name: str, value: Any, parameter: Any, context: typer.Context) -> Any:
    """The value as the option takes it; one value is a list of one.  Raises ValueError naming the file and the key."""
    if parameter.multiple and not isinstance(value, list):
        value = [value]
    key = f"--config {path}: {name.replace('_', '-')}"
    if name in JSON_OPTIONS and isinstance(value, dict):
        value = json.dumps(value, default=str)
    if not parameter.multiple and isinstance(value, list | dict):
        raise ValueError(f"{key} must be one value, got {value!r}")
    if parameter.multiple and not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key} must be a text in quotes or a list of them, got {value!r}")
    try:
        parameter.process_value(context, value)
    except Exception as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        raise ValueError(f"{key}: {text}") from None
    if name == "api_key" and not all(item.strip() for item in value):
        raise ValueError(f"{key} must not be empty")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Option names and values from a .yaml, .json or .toml file.  Raises ValueError naming the file."""
    text = path.read_text()
    try:
        if path.suffix == ".toml":
            import tomllib

            values: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except ImportError:
        raise ValueError(f"--config {path}: reading YAML needs the package pyyaml; .json and .toml do not") from None
    except Exception as error:
        raise ValueError(f"--config {path}: cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: must hold option names and values")
    return values


def serve(
    model_tag: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    model: options.Model = "nano",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    uds: Annotated[str | None, typer.Option(help="Unix socket to listen on, in place of host and port.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate, PEM: serve https.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key, PEM; default: in the certificate's file.")] = None,
    ssl_keyfile_password: Annotated[
        str | None, typer.Option(envvar="DEEPINFER_SSL_KEYFILE_PASSWORD", help="Password of the key.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="Certificates, PEM, that a client's own must be signed by; see --ssl-cert-reqs.")
    ] = None,
    ssl_cert_reqs: Annotated[
        int, typer.Option(min=0, max=2, help="Client certificates: 0 not asked for, 1 optional, 2 required.")
    ] = 0,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use; default: the model's.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="DEEPINFER_API_KEY", help="Key that clients must send; may be repeated.")
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Think by default: for chat requests that do not say.")
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Where default sampling parameters come from: auto (the model's generation_config.json), "
            "vllm (none: temperature 1), or a folder."
        ),
    ] = "auto",
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            "--allowed-origins",
            help="Origin of web pages that may call the server (CORS); may be repeated, or a JSON list; * means all.",
        ),
    ] = None,
    response_ttl: Annotated[
        float, typer.Option(min=0, help="Seconds that /v1/responses keeps answers, in memory; 0 keeps none.")
    ] = 24 * 3600.0,
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that requests in flight get to finish when the server is stopped.")
    ] = 30,
    web: Annotated[
        bool, typer.Option("--web/--no-web", help="Serve a chat page at / and live graphs at /status.")
    ] = True,
    max_queue: Annotated[
        int | None,
        typer.Option(min=0, help="Most sequences that wait; beyond: 429. Default: four times --max-num-seqs."),
    ] = None,
    max_concurrency_per_key: Annotated[
        int | None, typer.Option(min=1, help="Most requests of one API key at a time; beyond: 429.")
    ] = None,
    rate_limit: Annotated[
        float | None, typer.Option(min=0.001, help="Most requests of one API key a minute; beyond: 429.")
    ] = None,
    max_body_size: Annotated[str, typer.Option(help="Most bytes of one request body; beyond: 413.")] = "8MiB",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run the engine in a thread of the server, for debugging.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Processor threads of the engine; default: OMP_NUM_THREADS, or the cores there are, of more than "
            "two one less: the server needs it.",
        ),
    ] = None,
    stream_interval: Annotated[
        int, typer.Option(min=1, max=1024, help="Tokens that an event of a stream waits for; the first waits for none.")
    ] = 1,
    root_path: Annotated[str, typer.Option(help="What a proxy in front puts before every path, e.g. /llm.")] = "",
    profiler_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, envvar="DEEPINFER_PROFILER_PORT", help="Port for profiler traces, loopback."),
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", "--uvicorn-log-level", help="critical, error, warning, info or debug.")
    ] = "info",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    log_config_file: Annotated[
        Path | None, typer.Option(help="JSON for logging.config.dictConfig; DEEPINFER_LOG_CONFIG_FILE says the same.")
    ] = None,
    enable_log_requests: Annotated[
        bool, typer.Option("--enable-log-requests", help="Also log what clients write: their prompts.")
    ] = False,
    enable_log_outputs: Annotated[
        bool, typer.Option("--enable-log-outputs", help="Also log what the model writes.")
    ] = False,
    max_log_len: Annotated[
        int, typer.Option(min=1, help="Most characters of a prompt or an answer in the log.")
    ] = 4096,
    disable_access_log: Annotated[
        bool,
        typer.Option(
            "--disable-access-log", "--disable-uvicorn-access-log", help="No line in the log for an answered request."
        ),
    ] = False,
    disable_access_log_for_endpoints: Annotated[
        str, typer.Option(help="Paths with commas between them, e.g. /load,/v1/models: no line in the log for these.")
    ] = "",
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="No line of statistics in the log.")
    ] = False,
    docs: Annotated[bool, typer.Option("--docs/--disable-fastapi-docs", help="Serve /docs and /openapi.json.")] = True,
    force_usage: Annotated[
        bool,
        typer.Option("--enable-force-include-usage", help="Streams end with their usage, whether asked for or not."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(callback=load_config, is_eager=True, exists=True, dir_okay=False, help="YAML, JSON or TOML file."),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(hidden=True, help='As vLLM spells --thinking: {"thinking": true}.')
    ] = None,
    output_parser: Annotated[
        list[str] | None, typer.Option("--tool-call-parser", "--reasoning-parser", hidden=True, help="The model's own.")
    ] = None,
    always_on: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            "--enable-request-id-headers",
            "--enable-prompt-tokens-details",
            "--enable-metrics",
            "--enable-cache-report",
            "--enable-server-load-tracking",
            hidden=True,
            help="What other servers must be told and this one always does.",
        ),
    ] = False,  # fmt: skip
    chat_template: Annotated[str | None, typer.Option(hidden=True, help="Of vLLM; the prompt is the model's.")] = None,
    api_server_count: Annotated[int, typer.Option(hidden=True, help="Of vLLM; here one process answers.")] = 1,
    headless: Annotated[bool, typer.Option("--headless", hidden=True, help="Of vLLM, for several nodes.")] = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefill_chunk_size: options.PrefillChunkSize = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    num_blocks: options.NumBlocks = None,
    cache_memory: options.CacheMemory = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    preemption_mode: options.PreemptionMode = None,
    swap_memory: options.SwapMemory = None,
    prefill_step_ms: options.PrefillStepMs = None,
    speculative_config: options.Speculative = None,
    speculative_algorithm: options.SpeculativeAlgorithm = None,
    speculative_num_draft_tokens: options.SpeculativeNumDraftTokens = None,
    speculative_dspark_block_size: options.SpeculativeBlockSize = None,
) -> None:
    """Serve a model over HTTP: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages."""
    levels = ("critical", "error", "warning", "info", "debug")
    if log_level not in levels:
        raise ValueError(f"--log-level must be one of {', '.join(levels)}, got {log_level!r}")
    if log_format not in FORMATS:
        raise ValueError(f"--log-format must be one of {', '.join(FORMATS)}, got {log_format!r}")
    if log_config_file is not None:
        os.environ["DEEPINFER_LOG_CONFIG_FILE"] = str(log_config_file)  # the engine's process finds it there, too
    if not all(key.strip() for key in api_key or ()):
        raise ValueError("--api-key must not be empty")
    if model_tag is not None and model not in ("nano", model_tag):
        raise ValueError(f"give the model once, got {model_tag!r} and --model {model!r}")
    if chat_template is not None:
        raise ValueError("--chat-template is not supported: the prompt format belongs to the model")
    if api_server_count != 1:
        raise ValueError(
            f"--api-server-count must be 1, got {api_server_count}: one process answers all requests; start several "
            "servers on ports of their own for more"
        )
    if headless:
        raise ValueError("--headless is not supported: an engine runs on one machine, beside its server")
    if root_path and not ROOT_PATH.fullmatch(root_path):
        raise ValueError(f"--root-path must be a path such as /llm, without a slash at its end, got {root_path!r}")
    quiet_paths = [path.strip() for path in disable_access_log_for_endpoints.split(",") if path.strip()]
    if not all(path.startswith("/") for path in quiet_paths):
        message = "must be paths with commas between them, each with a / at its start"
        raise ValueError(f"--disable-access-log-for-endpoints {message}, got {disable_access_log_for_endpoints!r}")
    thinking = thinking or wants_thinking(default_chat_template_kwargs)
    check_parsers(output_parser or [])
    engine_config = options.make_engine_config(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk_size=prefill_chunk_size,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        cache_memory=cache_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        preemption_mode=preemption_mode,
        swap_memory=swap_memory,
        prefill_step_ms=prefill_step_ms,
        speculative_config=options.sglang_speculation(
            speculative_config, speculative_algorithm, speculative_num_draft_tokens, speculative_dspark_block_size
        ),
    )
    if disable_log_stats:
        os.environ["DEEPINFER_STATS_INTERVAL"] = "0"
    if profiler_port is not None:
        os.environ["DEEPINFER_PROFILER_PORT"] = str(profiler_port)
    from deepinfer.server.content_log import ContentLog
    from deepinfer.server.launch import run_server
    from deepinfer.server.listening import Listening

    run_server(
        model_tag or model,
        engine_config,
        listening=Listening(
            host, port, uds, ssl_certfile, ssl_keyfile, ssl_keyfile_password, ssl_ca_certs, ssl_cert_reqs
        ),
        served_model_name=served_model_name,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(origin for value in allowed_origin or () for origin in origins(value)),
        default_thinking=thinking,
        generation_config=generation_config,
        response_ttl=response_ttl,
        shutdown_timeout=shutdown_timeout,
        log_level=log_level,
        log_format=log_format,
        content_log=ContentLog(enable_log_requests, enable_log_outputs, max_log_len),
        quiet_paths=frozenset(quiet_paths),
        web=web,
        in_process=in_process,
        max_queue=max_queue,
        max_concurrency_per_key=max_concurrency_per_key,
        rate_limit=rate_limit,
        max_body_bytes=parse_bytes(max_body_size, "--max-body-size"),
        threads=threads,
        root_path=root_path,
        stream_interval=stream_interval,
        access_log=not disable_access_log,
        docs=docs,
        force_usage=force_usage,
    )


def wants_thinking(template_kwargs: str | None) -> bool:
    """Whether vLLM's --default-chat-template-kwargs ask for thinking.  Raises ValueError for anything else in them."""
    try:
        asked = json.loads(template_kwargs or "{}")
    except ValueError:
        asked = None
    known = ("thinking", "enable_thinking")
    if not isinstance(asked, dict) or not all(key in known and isinstance(asked[key], bool) for key in asked):
        message = f"must be a JSON object of {' or '.join(known)}, true or false, got {template_kwargs!r}"
        raise ValueError(f"--default-chat-template-kwargs {message}")
    return any(asked.values())


def check_parsers(names: list[str]) -> None:
    """Other servers must be told which parser fits a model; here it is the model's own.  Raises ValueError."""
    from deepinfer.server.parsers import KNOWN_PARSERS

    for name in names:
        if name not in KNOWN_PARSERS:
            raise ValueError(f"--tool-call-parser, --reasoning-parser: one of {', '.join(KNOWN_PARSERS)}, got {name!r}")


def origins(value: str) -> list[str]:
    """One origin, or vLLM's JSON list of them."""
    if not value.startswith("["):
        return [value]
    try:
        listed = json.loads(value)
    except ValueError:
        listed = [None]
    if not all(isinstance(origin, str) for origin in listed):
        raise ValueError(f"--allowed-origins must be an origin or a JSON list of them, got {value!r}")
    return listed
