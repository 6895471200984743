"""Where the server listens: an address or a Unix socket, with TLS or without."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import shown


@dataclass(frozen=True)
class Listening:
    """`uds`, a path, takes the place of host and port.  The rest is named as uvicorn and vLLM name it."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE

    def check(self) -> None:
        """Raise ValueError naming the option for certificates that cannot be used."""
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ValueError(f"--{name.replace('_', '-')}: there is no file {path!r}")
        if self.ssl_certfile is None:
            if self.ssl_keyfile or self.ssl_ca_certs or self.ssl_keyfile_password or self.ssl_cert_reqs:
                names = "--ssl-keyfile, --ssl-keyfile-password, --ssl-ca-certs and --ssl-cert-reqs"
                raise ValueError(f"{names} need --ssl-certfile")
            return
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs 1 and 2 need --ssl-ca-certs, by which a client's certificate is judged")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A function, because without a password OpenSSL would ask the terminal for it.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(f"--ssl-certfile, --ssl-keyfile or its password cannot be used: {reason}") from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except ssl.SSLError as error:
                raise ValueError(f"--ssl-ca-certs cannot be used: {error.reason or error}") from None

    def bind(self) -> socket.socket:
        """A bound socket.  Raises ValueError naming the option if the address cannot be had."""
        return bind_path(self.uds) if self.uds is not None else bind_port(self.host, self.port)

    def url(self, listener: socket.socket) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{port}"

    def uvicorn_options(self) -> dict[str, Any]:
        names = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs")
        return {name: getattr(self, name) for name in names}


def bind_port(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises ValueError naming the options."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, ValueError) as error:  # ValueError: no name of a host can be written like that
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on --host {shown(host)} --port {port}: {reason}") from None
    return listener


def bind_path(path: str) -> socket.socket:
    """A Unix socket in the place of one that nobody listens on any more; no other file is removed."""
    if not path or "\0" in path:
        raise ValueError(f"--uds must be a path, got {shown(path)}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not is_served(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return listener


def is_served(path: str) -> bool:
    """Whether somebody listens at the path of a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
