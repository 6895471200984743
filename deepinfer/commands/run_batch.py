"""`deepinfer run-batch`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands import options
from deepinfer.commands.parsing import OptionCommand

if TYPE_CHECKING:
    import httpx

    from deepinfer.config.engine import EngineConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
AHEAD = 2  # requests under way for each sequence that the engine runs at once


def register(app: typer.Typer) -> None:
    app.command(
        "run-batch",
        cls=OptionCommand,
        epilog=options.examples("deepinfer run-batch -i requests.jsonl -o answers.jsonl"),
    )(run_batch)


@options.takes(engine=options.ENGINE | {"max_num_seqs": (options.MaxNumSeqs, None)})
def run_batch(
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", exists=True, dir_okay=False, help="One request a line, as JSON.")
    ],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", dir_okay=False, help="Where answers go.")],
    model: options.Model = "nano",
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests: {"custom_id", "method": "POST", "url", "body"} a line, as OpenAI's Batch API has it.

    Answers come in the order of the requests.  A request that is refused has its error there, and exit code 1 says
    that there are some.
    """
    requests = read_requests(input_file)
    failed = asyncio.run(
        answer_all(requests, model, options.make_engine_config(kind="completion", **engine), output_file)
    )
    print(f"{len(requests) - failed} answered, {failed} failed: {output_file}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError naming the line of a request that is none."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--input-file {path}, line {number}: not JSON ({error})") from None
        where = f"--input-file {path}, line {number}"
        if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
            raise ValueError(f"{where}: must be an object with a custom_id")
        if request.get("method", "POST") != "POST" or request.get("url") not in URLS:
            raise ValueError(f"{where}: must be a POST to one of {', '.join(URLS)}, got {request.get('url')!r}")
        if not isinstance(request.get("body"), dict):
            raise ValueError(f"{where}: body must be an object")
        requests.append(request)
    return requests


async def answer_all(requests: list[dict[str, Any]], model: str, config: EngineConfig, path: Path) -> int:
    """Write the answers; how many are errors."""
    failed = 0
    async with serving(model, config) as http, asyncio.TaskGroup() as group:
        slots = asyncio.Semaphore(AHEAD * config.max_num_seqs)

        async def ask(request: dict[str, Any]) -> dict[str, Any]:
            async with slots:
                body = request["body"] | {"stream": False}
                return answer_line(request["custom_id"], await http.post(request["url"], json=body))

        tasks = [group.create_task(ask(request)) for request in requests]
        with path.open("w", encoding="utf-8") as file:
            for task in tasks:
                line = await task
                failed += line["response"]["status_code"] != 200
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return failed


def answer_line(custom_id: str, answer: httpx.Response) -> dict[str, Any]:
    """A line of the output file, in OpenAI's batch format."""
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id"),
        "body": answer.json(),
    }
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


@asynccontextmanager
async def serving(model: str, config: EngineConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server's application in this process, without a network."""
    import httpx

    from deepinfer.server.app import create_app
    from deepinfer.server.metrics import Metrics
    from deepinfer.server.state import ServerState

    with options.running_engine(model, config) as engine:
        app = create_app(ServerState(engine, Metrics(engine.name)), web=False)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://deepinfer", timeout=None) as http:
            yield http
