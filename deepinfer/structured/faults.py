"""Where in a JSON Schema the fault is that a grammar library finds: it says what is wrong, and not where."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

from deepinfer.structured.backend import Backend
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.json_schema import moved, needed_by, subschemas

SECONDS = 0.3  # of CPU for looking
_PREFIX = "so_args.schema: "
_POINTER = re.compile(r" #(/|:| )")  # it says where already
_UNSATISFIABLE = _PREFIX + "Unsatisfiable"


def placed(error: ValueError, constraint: Constraint, backend: Backend) -> ValueError:
    """The error of the innermost schema that is at fault by itself, with its pointer, if that can be found out."""
    reason = str(error)
    if constraint.schema_type != "json" or not reason.startswith(_PREFIX) or _POINTER.search(reason):
        return error
    schema, end = json.loads(constraint.schema), time.thread_time() + SECONDS
    place, node, is_found = "#", schema, True
    while is_found:
        is_found, needed = False, needed_by(node, place)
        for at, part in subschemas(node, place):
            if not isinstance(part, dict) or time.thread_time() > end:
                continue
            inner = _reason(part, schema, constraint, backend)
            unsatisfiable = at in needed and reason.startswith(_UNSATISFIABLE) and inner is not None
            if inner == reason or unsatisfiable:
                place, node, reason, is_found = at, part, inner or reason, True
                break
    return ValueError(f"{_PREFIX}{place}: {reason.removeprefix(_PREFIX)}")


def _reason(part: dict[str, Any], root: Any, constraint: Constraint, backend: Backend) -> str | None:
    """What is wrong with a part of the schema as a schema of its own."""
    alone = {**moved(part), "$defs": {"root": moved(root)}} if '"$ref"' in json.dumps(part) else part
    try:
        backend.build(backend.write(replace(constraint, schema=json.dumps(alone))))
    except ValueError as error:
        return str(error)
    return None
