"""The web page's files: what is sent, how it is protected, and that nothing it refers to is missing."""

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

import deepinfer.server.web
from tests.server.process import Server, start_server

STATIC = Path(deepinfer.server.web.__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"/": "chat.html", "/status": "status.html"}
FILES = PAGES | {f"/web/{path.name}": path.name for path in STATIC.iterdir() if path.suffix != ".html"}


class References(HTMLParser):
    """Addresses in a page, its element ids, and whatever a strict Content-Security-Policy would block."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.blocked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]
        inline = tag == "style" or (tag == "script" and "src" not in given)
        if inline or any(name == "style" or name.startswith("on") for name in given):
            self.blocked.append(f"{tag} {given}")


def policy(answer: httpx.Response) -> dict[str, str]:
    directives = answer.headers["content-security-policy"].split(";")
    return {name: value for name, _, value in (directive.strip().partition(" ") for directive in directives)}


@pytest.mark.parametrize("path", FILES)
def test_files_are_served_without_a_key(server: Server, path: str) -> None:
    answer = httpx.get(server.url + path)
    content = (STATIC / FILES[path]).read_bytes()
    if path in PAGES:
        content = (STATIC / "head.html").read_bytes().replace(
            b"PAGE", FILES[path].removesuffix(".html").encode()
        ) + content
    assert answer.status_code == 200 and answer.content == content
    assert answer.headers["content-type"].partition(";")[0] == TYPES[Path(FILES[path]).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    head = httpx.head(server.url + path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(content)), b"")


@pytest.mark.parametrize("path", FILES)
def test_an_unchanged_file_is_not_sent_again(server: Server, path: str) -> None:
    etag = httpx.get(server.url + path).headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        again = httpx.get(server.url + path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert httpx.get(server.url + path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", FILES)
def test_the_policy_lets_nothing_in_from_elsewhere(server: Server, path: str) -> None:
    rules = policy(httpx.get(server.url + path))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' data:"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"


@pytest.mark.parametrize("page", PAGES)
def test_pages_refer_to_what_exists_and_hold_nothing_inline(server: Server, page: str) -> None:
    found = References(httpx.get(server.url + page).text)
    assert found.blocked == []
    assert len(set(found.ids)) == len(found.ids)
    assert any(link.endswith(".css") for link in found.links) and any(link.endswith(".js") for link in found.links)
    for link in found.links:
        assert link.startswith("#") and link[1:] in found.ids or httpx.get(server.url + link).status_code == 200, link


def test_modules_import_what_exists() -> None:
    for path in STATIC.glob("*.js"):
        source = path.read_text()
        for names, module in re.findall(r"^import \{([^}]*)\} from \"\./([\w.]+)\";", source, re.MULTILINE):
            exported = (STATIC / module).read_text()
            for name in names.split(","):
                assert re.search(rf"^export .*?\b{name.strip()}\b", exported, re.MULTILINE), f"{path.name}: {name}"
        assert len(re.findall(r"^import ", source, re.MULTILINE)) == len(re.findall(r'from "\./\w+\.js";', source))


def test_scripts_never_parse_html_or_code() -> None:
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    for path in STATIC.glob("*.js"):
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(dangerous, code), path.name


def test_pages_and_scripts_find_their_elements() -> None:
    """Every element that a script asks for by id is in its page."""
    scripts = {"chat.html": ("chat.js", "settings.js", "images.js"), "status.html": ("status.js",)}
    for page, names in scripts.items():
        ids = set(References((STATIC / page).read_text()).ids)
        for name in names:
            wanted = set(re.findall(r'(?:\$|getElementById|\bfield)\("([\w-]+)"\)', (STATIC / name).read_text()))
            assert wanted and wanted <= ids, (name, wanted - ids)


@pytest.mark.parametrize("path", ["/web/nothing.js", "/web/..%2froutes.py", "/web/%2e%2e/routes.py", "/web/", "/web"])
def test_other_paths_do_not_exist(server: Server, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 401  # not even told without the key
    assert server.http.get(path).status_code == 404


def test_pages_are_read_only_and_no_part_of_the_api(server: Server) -> None:
    assert httpx.post(server.url + "/").status_code == 405
    assert not set(server.http.get("/openapi.json").json()["paths"]) & set(FILES)
    assert httpx.get(server.url + "/v1/models").status_code == 401


def test_no_web(checkpoint: Path) -> None:
    running = start_server(checkpoint, "--no-web")
    try:
        assert {httpx.get(running.url + path).status_code for path in FILES} == {404}
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)
