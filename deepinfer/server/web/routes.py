"""Serving the files of `static/`, held in memory: the pages at `/` and `/status`, what they load under `/web/`.

They contain nothing secret, so that they need no API key; what they ask the server for does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Scripts, styles and requests: this server's own only.  Trusted Types make assigning text to innerHTML an error.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Ask each time, answered by a 304: after an upgrade no page may mix files of two versions.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> Asset:
    content = path.read_bytes()
    if path.suffix == ".html":  # the head of a page is the same, but for its name
        content = (path.parent / "head.html").read_bytes().replace(b"PAGE", path.stem.encode()) + content
    return Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


_STATIC = Path(__file__).parent / "static"
_PAGES = {"/": "chat.html", "/status": "status.html"}
ASSETS = {path: _read(_STATIC / name) for path, name in _PAGES.items()} | {
    f"/web/{path.name}": _read(path) for path in sorted(_STATIC.iterdir()) if path.suffix in {".css", ".js", ".svg"}
}  # URL path -> file
PATHS = tuple(ASSETS)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/status", methods=["GET", "HEAD"])
@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def asset(request: Request) -> Response:
    """The file; 304 if the client has it; 404 for a name that does not exist."""
    found = ASSETS.get(request.scope["path"])
    if found is None:
        raise HTTPException(404)
    headers = _HEADERS | {"ETag": found.etag}
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or found.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
