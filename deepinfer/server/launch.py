"""Loading a model and listening: what `deepinfer serve` does."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from dataclasses import asdict
from types import FrameType

import uvicorn

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.process import show_log
from deepinfer.server.admission import Limits
from deepinfer.server.app import create_app
from deepinfer.server.connection import PatientProtocol, Seldom
from deepinfer.server.metrics import Metrics
from deepinfer.server.response_store import DEFAULT_TTL, ResponseStore
from deepinfer.server.state import ServerState
from deepinfer.server.text_engine import load_text_engine

logger = logging.getLogger("deepinfer.server")
SWITCH_SECONDS = 0.0005  # a worker thread's turn while the event loop waits; Python's 5 ms slow streams down
FILES = 256  # open files beside one connection for each sequence


def run_server(
    model: str,
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_keys: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    default_thinking: bool = False,
    response_ttl: float = DEFAULT_TTL,
    shutdown_timeout: int = 30,
    log_level: str = "info",
    web: bool = True,
    in_process: bool = False,
    max_queue: int | None = None,
    max_concurrency_per_key: int | None = None,
    rate_limit: float | None = None,
    max_body_bytes: int = Limits.max_body_bytes,
) -> None:
    """Serve until interrupted, then give requests in flight `shutdown_timeout` seconds to finish.

    The engine gets a process of its own unless `in_process`.  `max_queue` sequences may wait for it, by default four
    times as many as it runs at once.

    Raises ValueError for a bad model or address before anything is served.
    """
    max_queue = 4 * config.max_num_seqs if max_queue is None else max_queue
    raise_file_limit(FILES + config.max_num_seqs + max_queue)
    listener = listen(host, port)  # first, so that a taken port does not cost the time of loading
    with listener:
        show_log(log_level)
        text = load_text_engine(model, config, served_model_name, not in_process, log_level)
        state = ServerState(
            text,
            Metrics(text.name),
            api_keys,
            default_thinking,
            engine_config=json.loads(json.dumps(asdict(config), default=str)),
            responses=ResponseStore(response_ttl),
            limits=Limits(config.max_num_seqs + max_queue, max_concurrency_per_key, rate_limit, max_body_bytes),
        )
        bound_host, bound_port = listener.getsockname()[:2]
        bound_host = f"[{bound_host}]" if ":" in bound_host else bound_host
        print(f"serving {text.name!r} at http://{bound_host}:{bound_port}/v1", flush=True)
        settings = uvicorn.Config(
            create_app(state, allowed_origins, web), log_level=log_level, lifespan="on", http=PatientProtocol
        )
        logging.getLogger("uvicorn.error").addFilter(Seldom())
        sys.setswitchinterval(SWITCH_SECONDS)
        DrainingServer(settings, state, shutdown_timeout).run(sockets=[listener])


class DrainingServer(uvicorn.Server):
    """The first signal refuses new requests and lets running ones finish; a second one, or the timeout, cancels them.

    Meanwhile the server answers, so that /ready says 503 to whoever balances the load.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, timeout: float):
        super().__init__(config)
        self.state, self.timeout = state, timeout
        self.deadline = 0.0  # when to cancel, on the monotonic clock
        self.signal = signal.SIGTERM

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The deadline first: a signal may come between any two lines of on_tick.
        self.deadline = time.monotonic() + (0.0 if self.state.draining else self.timeout)
        self.state.draining, self.signal = True, signal.Signals(sig)

    async def on_tick(self, counter: int) -> bool:
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


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error.strerror}") from None
    return listener
