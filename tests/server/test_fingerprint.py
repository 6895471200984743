"""`system_fingerprint` names what answers, in every answer and chunk, and changes with whatever may change answers."""

import json
import shutil
from pathlib import Path

from deepinfer.server.fingerprint import system_fingerprint
from tests.server.process import MODEL, Server, lines_of


def test_it_changes_with_model_and_settings(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "max_num_seqs": 8}
    first = system_fingerprint(checkpoint, settings)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert system_fingerprint(copy, dict(reversed(settings.items()))) == first
    seen = {first, system_fingerprint(copy, settings | {"max_num_seqs": 9})}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"another": 1}))
    seen.add(system_fingerprint(copy, settings))
    with next(copy.glob("*.safetensors")).open("ab") as weights:
        weights.write(b"\0")
    seen.add(system_fingerprint(copy, settings))
    assert len(seen) == 4 and all(len(name) == 15 and name.startswith("fp_") for name in seen)


def test_answers_and_chunks_have_it(server: Server) -> None:
    common = {"model": MODEL, "max_tokens": 4, "ignore_eos": True}
    bodies = {
        "/v1/chat/completions": common | {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": common | {"prompt": "hi"},
    }
    found = []
    for path, body in bodies.items():
        found.append(server.http.post(path, json=body).json()["system_fingerprint"])
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        with server.http.stream("POST", path, json=asked) as answer:
            events = [json.loads(line[6:]) for line in lines_of(answer) if line.startswith("data: {")]
        found += [event["system_fingerprint"] for event in events]
    assert len(found) > 10 and len(set(found)) == 1 and found[0].startswith("fp_")
