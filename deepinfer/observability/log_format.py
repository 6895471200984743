"""How the log is printed: text for people, or JSON lines for machines."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from pathlib import Path
from typing import Any

from deepinfer import envs

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


def apply_log_config() -> None:
    """What the file of DEEPINFER_LOG_CONFIG_FILE says, if there is one: JSON for `logging.config.dictConfig`.

    Loggers that it does not name stay as they are. Raises ValueError naming the file.
    """
    path: Path | None = envs.get("DEEPINFER_LOG_CONFIG_FILE")
    if path is None:
        return
    try:
        config = json.loads(path.read_text())
        logging.config.dictConfig({"disable_existing_loggers": False, **config})
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RecursionError) as error:
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ValueError(f"DEEPINFER_LOG_CONFIG_FILE: {path} is no logging configuration in JSON: {reason}") from None
