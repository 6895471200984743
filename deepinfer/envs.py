"""Every DEEPINFER_* environment variable, typed, in one table. Read when used, so tests can change them."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer.errors import shown


def _bool(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"must be one of {', '.join(values)}")
    return values[text.lower()]


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _number(
    parse: type[int] | type[float], low: float, high: float = math.inf, low_open: bool = False
) -> Callable[[str], Any]:
    allowed = f"must be {'an integer' if parse is int else 'a number'} {'>' if low_open else '>='} {low}"
    allowed += f" and <= {high}" if high < math.inf else ""

    def parse_number(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= value <= high or value == math.inf or (low_open and value == low):
            raise ValueError(allowed)
        return value

    return parse_number


def _engine_timeout(text: str) -> float:
    value: float = _number(float, 0)(text)
    if 0 < value < 2:
        raise ValueError("must be 0 or a number >= 2: an engine gives a sign of life every second")
    return value


def _path(text: str) -> Path:
    if not text:
        raise ValueError("must not be empty")
    return Path(text)


# name -> (parser, default, meaning)
VARIABLES: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "DEEPINFER_API_KEY": (str, None, "key that clients of the server must send"),
    "DEEPINFER_CACHE_DIR": (
        _path,
        None,
        "where compiled kernels are kept; default: deepinfer in the user's cache folder",
    ),
    "DEEPINFER_CHECK_INTEGRITY": (_bool, False, "check queues, blocks and slots after every step (slow)"),
    "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": (
        _number(int, 1),
        8,
        "distance between the batch sizes that are captured as CUDA graphs",
    ),
    "DEEPINFER_CUDA_GRAPHS": (_bool, None, "whether decode steps are captured as CUDA graphs; default: on a GPU"),
    "DEEPINFER_DEBUG": (_bool, False, "show the traceback of an error on the command line"),
    "DEEPINFER_ENABLE_MTP_VARLEN": (
        _bool,
        True,
        "whether speculation verifies as many drafts as pay, a number for each sequence and step; 0: always all",
    ),
    "DEEPINFER_ENGINE_KIND": (
        _choice("normal", "prefill", "decode", "completion"),
        "normal",
        "what an engine does: both phases, only one of them, or both for throughput (offline work)",
    ),
    "DEEPINFER_ENGINE_TIMEOUT": (
        _engine_timeout,
        300.0,
        "seconds without a sign of life after which a server restarts its engine process; 0: never",
    ),
    "DEEPINFER_GC_INTERVAL_STEP": (
        _number(int, 0),
        1000,
        "steps between garbage collections of a busy engine; 0 leaves Python's collector as it is",
    ),
    "DEEPINFER_GRAMMAR_BACKEND": (
        _choice("llguidance", "xgrammar"),
        "llguidance",
        "library that compiles the grammars of structured output",
    ),
    "DEEPINFER_GRAMMAR_TIMEOUT": (
        _number(float, 0, low_open=True),
        5.0,
        "seconds that a server's grammar may take to be compiled",
    ),
    "DEEPINFER_KERNELS": (
        _choice("auto", "reference", "triton", "tilelang"),
        "auto",
        "auto takes the fastest kernels there are, triton on a GPU none in CUDA C++, tilelang TileLang's "
        "before those, reference the PyTorch ones",
    ),
    "DEEPINFER_LOG_CONFIG_FILE": (
        _path,
        None,
        "JSON for Python's logging.config.dictConfig, applied behind the server's own settings of its log",
    ),
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": (
        _number(int, 1),
        None,
        "tokens of a sequence that speculation may take back; default: what the model's draft head needs",
    ),
    "DEEPINFER_PEAK_FLOPS": (
        _number(float, 0, low_open=True),
        None,
        "FLOP/s of the device, for MFU; default: by its name",
    ),
    "DEEPINFER_PROFILER_DIR": (_path, Path("deepinfer-traces"), "folder that profiler traces are written to"),
    "DEEPINFER_PROFILER_HOST": (str, "127.0.0.1", "address of the profiler's HTTP endpoint"),
    "DEEPINFER_PROFILER_PORT": (
        _number(int, 0, 65535),
        None,
        "port of the profiler's HTTP endpoint; default: no endpoint",
    ),
    "DEEPINFER_SSL_KEYFILE_PASSWORD": (str, None, "password of the server's TLS key"),
    "DEEPINFER_STATS_INTERVAL": (_number(float, 0), 10.0, "seconds between lines of statistics in the log; 0: none"),
    "DEEPINFER_TIMERS": (_bool, False, "time the parts of a step and log their medians with the statistics"),
    "DEEPINFER_TORCH_COMPILE": (_bool, False, "run decode steps through torch.compile (minutes of compiling)"),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": (
        _number(int, 1),
        None,
        "last prompt tokens that run the decoder layers; at least window + backtracking tokens",
    ),
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": (
        _choice("off", "mask", "compact"),
        "off",
        "whether prefill runs only those: mask hides the other rows, compact drops them",
    ),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": (
        _bool,
        None,
        "whether a step is launched before the tokens of the last one are read; default: on a GPU",
    ),
}


def get(name: str) -> Any:
    """Value of one variable of the table. Raises ValueError naming it when the text cannot be parsed."""
    parse, default, _ = VARIABLES[name]
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={shown(text)}: {error}") from None
