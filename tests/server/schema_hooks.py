"""Hooks of schemathesis (SCHEMATHESIS_HOOKS): bodies that get past the first check, and answers that end soon."""

import os
from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict):
        if "model" in body:
            body["model"] = os.environ["SERVED_MODEL"]  # a made-up name is a 404, whatever else there is
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(name)) is int and body[name] > 8:
                body[name] = 8
        if type(body.get("n")) is int and body["n"] > 2:
            body["n"] = 2
    return body
