"""How the log is printed: text for people, or JSON lines for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

FORMATS = ("text", "json")


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, and the `fields` that the record was given."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_handler(log_format: str) -> logging.Handler:
    """Prints to standard error in one of FORMATS."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(levelname)s:     %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    return handler
