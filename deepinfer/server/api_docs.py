"""`/openapi.json`, and `/docs`: a page that lists the routes and their fields, with nothing loaded from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

router = APIRouter(include_in_schema=False)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} {version}: routes</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }}
summary {{ cursor: pointer; padding: .2em 0; }} code, pre {{ font-family: ui-monospace, monospace; font-size: 13px; }}
table {{ border-collapse: collapse; margin: .5em 0 1em 1.5em; }}
td {{ padding: .1em .8em .1em 0; vertical-align: top; }}
p {{ margin: .3em 0 .3em 1.5em; white-space: pre-line; }} b {{ display: inline-block; min-width: 4.5em; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #ddd; }} a {{ color: #8ab4f8; }} }}
</style></head>
<body><h1>{title} {version}</h1>
<p>The same as a schema: <a href="openapi.json">openapi.json</a>. What the fields mean: docs/server.md.</p>
{routes}
</body></html>
"""
# No script runs on this page, and nothing is loaded.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def docs(request: Request) -> Response:
    schema = request.app.openapi()
    routes = [
        _route(path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    title, version = escape(schema["info"]["title"]), escape(schema["info"]["version"])
    return HTMLResponse(_PAGE.format(title=title, version=version, routes="\n".join(routes)), headers=_HEADERS)


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    """One route, folded: its description, and the fields of its body."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    required = body.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in body.get("properties", {}).items()
    ]
    text = escape(operation.get("description", ""))
    head = f"<summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
    return f"<details>{head}<p>{text}</p><table>{''.join(rows)}</table></details>"


def _type(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "anyOf" in field:
        kinds = [_type(kind) for kind in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "anything"))
