"""Loading a model and listening: what `deepinfer serve` does."""

from __future__ import annotations

import logging
import socket

import uvicorn

from deepinfer.config.engine import EngineConfig
from deepinfer.server.app import create_app
from deepinfer.server.metrics import Metrics
from deepinfer.server.state import ServerState
from deepinfer.server.text_engine import load_text_engine


def run_server(
    model: str,
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_keys: tuple[str, ...] = (),
    default_thinking: bool = False,
    shutdown_timeout: int = 30,
    log_level: str = "info",
) -> None:
    """Serve until interrupted, then give requests in flight `shutdown_timeout` seconds to finish.

    Raises ValueError for a bad model or address before anything is served.
    """
    listener = listen(host, port)  # first, so that a taken port does not cost the time of loading
    with listener:
        show_log(log_level)
        text = load_text_engine(model, config, served_model_name)
        state = ServerState(text, Metrics(text.name), api_keys, default_thinking)
        bound_host, bound_port = listener.getsockname()[:2]
        bound_host = f"[{bound_host}]" if ":" in bound_host else bound_host
        print(f"serving {text.name!r} at http://{bound_host}:{bound_port}/v1", flush=True)
        settings = uvicorn.Config(
            create_app(state), log_level=log_level, timeout_graceful_shutdown=shutdown_timeout, lifespan="on"
        )
        uvicorn.Server(settings).run(sockets=[listener])


def show_log(level: str) -> None:
    """Print the engine's own log beside uvicorn's, whose settings cover only itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
    log = logging.getLogger("deepinfer")
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(handler)
        log.propagate = False


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error.strerror}") from None
    return listener
