"""Where the server listens (TLS, a Unix socket), what it says while the model loads, and what it logs."""

import json
import logging
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer.engine.process import show_log
from deepinfer.observability.log_format import apply_log_config
from deepinfer.server.listening import Listening, bind_path
from tests.server.process import MODEL, Server, start_server

ASK = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@contextmanager
def serving(checkpoint: Path, *options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server as it is right after it says where it listens, (process, URL): it loads the model."""
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--model", str(checkpoint), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"listening at (\S+) while", line)
            if found:
                yield process, found[1]
                return
        raise AssertionError("the server did not start")
    finally:
        process.kill()
        process.wait()


def wait_until_ready(client: httpx.Client, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:  # it says where it will listen a moment before it does
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def make_certificate(folder: Path, password: str | None = None) -> tuple[str, str]:
    """(certificate, key) of a new self-signed certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    protection = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *subject, *protection], check=True, capture_output=True)
    return certificate, key


def test_https_with_a_protected_key(checkpoint: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "secret")
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-keyfile-password", "secret")
    trusting = ssl.create_default_context(cafile=certificate)
    with serving(checkpoint, "--served-model-name", MODEL, *options) as (_, url):
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=trusting, timeout=60) as client:
            wait_until_ready(client)
            assert client.post("/v1/completions", json=ASK).json()["usage"]["completion_tokens"] == 4
            with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")


def test_a_client_certificate_can_be_required(checkpoint: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", certificate)
    with serving(checkpoint, *options, "--ssl-cert-reqs", "2") as (_, url):
        known = ssl.create_default_context(cafile=certificate)
        known.load_cert_chain(certificate, key)
        with httpx.Client(base_url=url, verify=known, timeout=60) as client:
            wait_until_ready(client)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=ssl.create_default_context(cafile=certificate))


@pytest.mark.parametrize("where", [{"uds": ""}, {"uds": "a\0b"}, {"host": ""}, {"host": "a" * 300}, {"host": "a\0b"}])
def test_bad_addresses_are_refused_by_name(where: dict[str, str]) -> None:
    (name,) = where
    with pytest.raises(ValueError, match=f"--{name} "):
        Listening(**where).bind()  # type: ignore[arg-type]


def test_bad_certificates_are_refused_by_name(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "secret")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": "missing.pem"}, "--ssl-certfile: there is no file"),
        ({"ssl_keyfile": key}, "need --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs need --ssl-certfile"),
        ({"ssl_certfile": certificate, "ssl_cert_reqs": 1}, "--ssl-cert-reqs 1 and 2 need --ssl-ca-certs"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_keyfile_password": "other"}, "password"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key}, "password"),
        ({"ssl_certfile": key, "ssl_keyfile": key, "ssl_keyfile_password": "secret"}, "--ssl-certfile"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            Listening(**options).check()
    (tmp_path / "ca.pem").write_text("nothing")
    authorities = {"ssl_keyfile_password": "secret", "ssl_ca_certs": str(tmp_path / "ca.pem")}
    with pytest.raises(ValueError, match="--ssl-ca-certs"):
        Listening(ssl_certfile=certificate, ssl_keyfile=key, **authorities).check()


def test_a_unix_socket(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    bind_path(str(path)).close()  # left behind by a server that was killed: it is replaced
    with serving(checkpoint, "--served-model-name", MODEL, "--uds", str(path)) as (process, url):
        assert url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://local", timeout=60) as client:
            wait_until_ready(client)
            assert client.post("/v1/completions", json=ASK).json()["usage"]["completion_tokens"] == 4
            with pytest.raises(ValueError, match="cannot listen on --uds"):
                bind_path(str(path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM) and not path.exists()


def test_no_other_file_is_replaced_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(ValueError, match="cannot listen on --uds"):
        bind_path(str(path))
    assert path.read_text() == "precious"


def test_the_port_answers_while_the_model_loads(checkpoint: Path) -> None:
    """Liveness at once, readiness with the reason; requests are refused until then, and served afterwards."""
    with serving(checkpoint, "--served-model-name", MODEL) as (_, url):
        with httpx.Client(base_url=url, timeout=60, transport=httpx.HTTPTransport(retries=8)) as client:
            early = client.get("/ready")
            assert early.status_code == 503 and "loads the model" in early.json()["error"]["message"]
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
            for route, body in (("/v1/completions", ASK), ("/tokenize", {"prompt": "hello"})):
                refused = client.post(route, json=body)
                assert refused.status_code == 503 and "loads the model" in refused.json()["error"]["message"], route
            assert client.get("/metrics").status_code == 200
            wait_until_ready(client)
            assert client.post("/v1/completions", json=ASK).status_code == 200
            assert 'num_gpu_blocks="1"' not in client.get("/metrics").text


def test_a_model_that_cannot_be_loaded_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"not weights")
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--model", str(folder), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "safetensors" in ended.stderr and "Traceback" not in ended.stderr


def test_the_server_can_be_stopped_while_the_model_loads(checkpoint: Path) -> None:
    with serving(checkpoint, "--shutdown-timeout", "0") as (process, url):
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=8)) as client:
            assert client.get("/ready").status_code == 503
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=15)


def test_the_server_process_has_no_torch() -> None:
    code = "import sys, deepinfer.server.launch, deepinfer.commands.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture(scope="module")
def json_log(checkpoint: Path) -> Iterator[Server]:
    running = start_server(checkpoint, "--served-model-name", MODEL, "--log-format", "json")
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def records(server: Server, request_id: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 10
    while True:
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        found = [line for line in lines if line.get("request_id") == request_id]
        if found:
            return found
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_json_line(json_log: Server, stream: bool) -> None:
    name = f"a-{stream}"
    body = ASK | {"prompt": "the secret word", "stream": stream}
    answer = httpx.post(f"{json_log.url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=60)
    assert answer.status_code == 200
    (line,) = records(json_log, name)
    assert (line["level"], line["route"], line["method"], line["status"]) == ("info", "/v1/completions", "POST", 200)
    assert line["completion_tokens"] == 4 and line["prompt_tokens"] > 1
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert not any("secret word" in text for text in json_log.log)


def test_refused_requests_are_logged_without_what_they_held(json_log: Server) -> None:
    headers = {"X-Request-Id": "b"}
    httpx.post(f"{json_log.url}/v1/completions", content=b'{"prompt": "hush hush"', headers=headers)
    (line,) = records(json_log, "b")
    assert line["status"] == 400 and line["completion_tokens"] == 0 and line["ttft_s"] is None
    httpx.get(f"{json_log.url}/made-up-by-a-client", headers={"X-Request-Id": "c"})
    assert records(json_log, "c")[0]["route"] == "unknown route"
    assert not any("hush" in text or "made-up" in text for text in json_log.log)
    others = [text for text in json_log.log if text.strip() and not text.startswith("{")]
    assert [text.partition(" ")[0] for text in others] == ["serving"], "every other line is JSON"


def test_a_log_config_says_where_the_log_of_a_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, config = tmp_path / "server.log", tmp_path / "log.json"
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "mine"}
    settings = {
        "version": 1,
        "formatters": {"mine": {"format": "%(name)s | %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"deepinfer": {"handlers": ["file"], "level": "INFO"}},
    }
    config.write_text(json.dumps(settings))
    monkeypatch.setenv("DEEPINFER_LOG_CONFIG_FILE", str(config))
    logger = logging.getLogger("deepinfer")
    before = logger.level, logger.handlers[:], logger.propagate
    logger.handlers.clear()
    try:
        show_log("error")
        logging.getLogger("deepinfer.server.requests").info("a request")
    finally:
        logger.handlers[0].close()
        logger.level, logger.handlers[:], logger.propagate = before
        logger.setLevel(before[0])
    assert log.read_text() == "deepinfer.server.requests | a request\n"


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "[" * 200_000, '{"version": 2}', '{"version": 1, "handlers": {"a": {"class": "b"}}}']
)
def test_a_bad_log_config_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("DEEPINFER_LOG_CONFIG_FILE", str(path))
    with pytest.raises(ValueError, match="^DEEPINFER_LOG_CONFIG_FILE: .*log.json is no logging configuration"):
        apply_log_config()


def test_bodies_are_logged_only_when_asked_for(checkpoint: Path) -> None:
    options = ("--enable-log-requests", "--enable-log-outputs", "--max-log-len", "90", "--log-format", "json")
    quiet = ("--disable-access-log-for-endpoints", "/v1/completions, /version")
    running = start_server(checkpoint, "--served-model-name", MODEL, *options, *quiet)
    try:
        body = ASK | {
            "prompt": "the secret word",
            "user": "x" * 100,
            "n": 2,
            "temperature": 1,
            "seed": 1,  # special tokens are in the log and not in the text: these draws have none
            "return_token_ids": True,
        }
        headers = {"X-Request-Id": "a"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert httpx.get(f"{running.url}/version", headers=headers).status_code == 200
        assert httpx.get(f"{running.url}/load", headers={"X-Request-Id": "b"}).status_code == 200
        assert records(running, "b")[0]["route"] == "/load"
        asked, *answered = records(running, "a")  # and no line about either request itself
        assert asked["body"] == answer.request.content.decode()[:90] and "the secret word" in asked["body"]
        assert asked["logger"] == "deepinfer.server.content"
        written = [choice["text"][:90] for choice in answer.json()["choices"]]
        assert sorted(record["output"] for record in answered) == sorted(written)
        assert {record["finish_reason"] for record in answered} <= {"stop", "length"}
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)


def test_a_taken_port_is_refused(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot listen on --host"):
            Listening("127.0.0.1", taken.getsockname()[1]).bind()
