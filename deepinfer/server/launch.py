"""Loading a model and listening: what `deepinfer serve` does."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from deepinfer.config.engine import EngineConfig
from deepinfer.config.generation import generation_defaults
from deepinfer.engine.client import EngineClient
from deepinfer.engine.model_path import resolve_model
from deepinfer.engine.process import show_log
from deepinfer.observability.log_format import apply_log_config, log_handler
from deepinfer.params import SamplingParams
from deepinfer.server.admission import Limits
from deepinfer.server.app import create_app
from deepinfer.server.connection import PatientProtocol, Seldom
from deepinfer.server.content_log import ContentLog
from deepinfer.server.fingerprint import system_fingerprint
from deepinfer.server.listening import Listening
from deepinfer.server.metrics import Metrics
from deepinfer.server.response_store import DEFAULT_TTL, ResponseStore
from deepinfer.server.state import ServerState
from deepinfer.server.text_engine import load_text_engine, start_text_engine

logger = logging.getLogger("deepinfer.server")
SWITCH_SECONDS = 0.0005  # a worker thread's turn while the event loop waits; Python's 5 ms slow streams down
FILES = 256  # open files beside one connection for each sequence


def run_server(
    model: str,
    config: EngineConfig,
    *,
    listening: Listening | None = None,
    served_model_name: str | None = None,
    api_keys: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    default_thinking: bool = False,
    generation_config: str = "auto",
    response_ttl: float = DEFAULT_TTL,
    shutdown_timeout: int = 30,
    log_level: str = "info",
    log_format: str = "text",
    content_log: ContentLog | None = None,
    quiet_paths: frozenset[str] = frozenset(),
    web: bool = True,
    in_process: bool = False,
    max_queue: int | None = None,
    max_concurrency_per_key: int | None = None,
    rate_limit: float | None = None,
    max_body_bytes: int = Limits.max_body_bytes,
    threads: int | None = None,
    root_path: str = "",
    stream_interval: int = 1,
    access_log: bool = True,
    docs: bool = True,
    force_usage: bool = False,
) -> None:
    """Serve until interrupted, then give requests in flight `shutdown_timeout` seconds to finish.

    The engine gets a process of its own unless `in_process`; while it loads the model, /ready says so.  `max_queue`
    sequences may wait for it, by default four times as many as it runs at once.  `content_log`: what people wrote.
    `threads`: of its process.  `root_path`: what a proxy puts before every path.  `stream_interval`: tokens an event.
    `access_log`: a line for every answered request, but for those of `quiet_paths`.
    `force_usage`: streams end with their usage in any case.

    `generation_config`: see `sampling_defaults`.

    Raises ValueError for a bad model or address; EngineStoppedError if the engine dies while it loads.
    """
    listening = listening or Listening()
    listening.check()
    max_queue = 4 * config.max_num_seqs if max_queue is None else max_queue
    show_log(log_level, log_format)
    if not access_log:
        logging.getLogger("deepinfer.server.requests").setLevel("WARNING")
    raise_file_limit(FILES + config.max_num_seqs + max_queue)
    listener = listening.bind()  # first, so that a taken port does not cost the time of loading
    with listener:
        if in_process:
            text = load_text_engine(model, config, served_model_name)
        else:
            text = start_text_engine(model, config, served_model_name, log_level, log_format, threads)
        engine_config = json.loads(json.dumps(asdict(config), default=str))
        state = ServerState(
            text,
            Metrics(text.name),
            api_keys,
            default_thinking,
            engine_config=engine_config,
            sampling_defaults=sampling_defaults(model, generation_config),
            fingerprint=system_fingerprint(model, engine_config),
            responses=ResponseStore(response_ttl),
            limits=Limits(config.max_num_seqs + max_queue, max_concurrency_per_key, rate_limit, max_body_bytes),
            content_log=content_log or ContentLog(),
            quiet_paths=quiet_paths,
            stream_interval=stream_interval,
            force_usage=force_usage,
        )
        url = listening.url(listener)
        logger.info("listening at %s while the model loads", url)
        settings = uvicorn.Config(
            create_app(state, allowed_origins, web, root_path, docs),
            log_config=None,
            access_log=False,  # middleware.LogRequests says more
            lifespan="on",
            http=PatientProtocol,
            **listening.uvicorn_options(),
        )
        show_uvicorn_log(log_level, log_format)
        apply_log_config()
        sys.setswitchinterval(SWITCH_SECONDS)
        DrainingServer(settings, state, shutdown_timeout, url, listening.uds).run(sockets=[listener])
    if isinstance(text.engine, EngineClient) and text.engine.start_error is not None:
        raise text.engine.start_error


def sampling_defaults(model: str, source: str) -> dict[str, Any]:
    """What the model's generation_config.json recommends ("auto"), that of another folder, or nothing ("vllm")."""
    if source == "vllm":
        return {}
    folder = resolve_model(model) if source == "auto" else Path(source)
    if source != "auto" and not (folder / "generation_config.json").is_file():
        raise ValueError(
            f"--generation-config must be auto, vllm or a folder with generation_config.json, got {source!r}"
        )
    defaults = generation_defaults(folder)
    SamplingParams(**defaults)
    return defaults


def show_uvicorn_log(level: str, log_format: str) -> None:
    """Print uvicorn's log as our own; its usual steps are left out."""
    log = logging.getLogger("uvicorn")
    log.setLevel("WARNING" if level == "info" else level.upper())  # its steps of starting and stopping are no news
    log.addHandler(log_handler(log_format))
    log.propagate = False
    logging.getLogger("uvicorn.error").addFilter(Seldom())


class DrainingServer(uvicorn.Server):
    """The first signal refuses new requests and lets running ones finish; a second one, or the timeout, cancels them.

    Meanwhile the server answers, so that /ready says 503 to whoever balances the load.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, timeout: float, url: str, uds: str | None = None):
        """`url` is announced when the model is loaded; `uds` is a Unix socket's path, to be removed at the end."""
        super().__init__(config)
        self.state, self.timeout, self.url, self.uds = state, timeout, url, uds
        self.is_announced = False
        self.deadline = 0.0  # when to cancel, on the monotonic clock
        self.signal = signal.SIGTERM

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The deadline first: a signal may come between any two lines of on_tick.
        self.deadline = time.monotonic() + (0.0 if self.state.draining else self.timeout)
        self.state.draining, self.signal = True, signal.Signals(sig)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.uds is not None:  # before the signal that ended it all is raised again
            Path(self.uds).unlink(missing_ok=True)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if not self.is_announced and self.state.text.engine.state == "ready":
            self.is_announced = True
            print(f"serving {self.state.text.name!r} at {self.url}/v1", flush=True)
            config, num_blocks = self.state.engine_config, self.state.text.engine.stats().num_blocks
            config["device"] = self.state.text.engine.device  # "auto" is replaced where the model is loaded
            logger.info(
                "on %s: context of %s tokens, KV cache of %s tokens, at most %s sequences at a time",
                config["device"],
                f"{self.state.text.max_model_len:,}",
                f"{num_blocks * config['block_size']:,}",
                config["max_num_seqs"],
            )
        if getattr(self.state.text.engine, "start_error", None) is not None:
            self.should_exit = True  # the model cannot be loaded: run_server raises why
        if self.state.draining and self.state.gate.is_closed:
            await self.state.end_pause()  # else what has begun would never end
        if self.state.draining and not self.should_exit:
            left = self.deadline - time.monotonic()
            if left <= 0 or not self.state.running:
                self.config.timeout_graceful_shutdown = max(0.0, left)  # type: ignore[assignment]
                super().handle_exit(self.signal, None)
        return await super().on_tick(counter)


def raise_file_limit(wanted: int) -> None:
    """Every connection is an open file: raise the soft limit as far as needed, or say what is too low."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        logger.warning("the limit of open files (ulimit -n) is %d, --max-queue asks for %d", reachable, wanted)
