"""Numbers as people write them on a command line: `25.6k`, `32K`, `141GB`."""

import math
import re

from deepinfer.errors import shown

# Lower case is decimal and upper case binary, as in vLLM: 25.6k = 25,600 and 32K = 32,768.
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _parse(text: str, units: dict[str, int], field: str, examples: str, fold_case: bool) -> int:
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    unit = match.group(2) if match else ""
    unit = unit.lower() if fold_case else unit
    if match is None or unit not in units:
        raise ValueError(f"{field} must be a number such as {examples}, got {shown(text)}")
    value = float(match.group(1)) * units[unit]
    if math.isinf(value):
        raise ValueError(f"{field} must be a number below 1e308, such as {examples}, got {shown(text)}")
    if round(value) < 1:
        raise ValueError(f"{field} must be at least 1, got {text!r}")
    return round(value)


def parse_count(text: str, field: str) -> int:
    """A count of tokens or requests: `4096`, `25.6k` (decimal) or `32K` (binary).  Raises ValueError naming `field`."""
    return _parse(text, _COUNT_UNITS, field, "4096, 25.6k or 32K", fold_case=False)


def parse_bytes(text: str, field: str) -> int:
    """A size in bytes: `141GB` (decimal) or `16GiB` (binary), case ignored.  Raises ValueError naming `field`."""
    return _parse(text, _BYTE_UNITS, field, "141GB or 80GiB", fold_case=True)


def format_bytes(size: float) -> str:
    """1,500,000,000 -> `1.50 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
