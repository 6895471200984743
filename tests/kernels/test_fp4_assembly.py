"""The PTX that widens FP4, run in Python instruction by instruction: every code and scale gives its exact value."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

CUDA = Path(__file__).parent.parent.parent / "deepinfer/kernels/cuda"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RNG = np.random.default_rng(0)


def value_of(code: int) -> float:
    return (-1 if code & 8 else 1) * E2M1[code & 7]


def bf16_value(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def bf16_bits(value: float) -> int:
    """Round to nearest, ties to even."""
    bits = int(np.array([value], np.float32).view(np.uint32)[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def multiply_pairs(a: int, b: int) -> int:
    low, high = (bf16_bits(bf16_value(a >> s & 0xFFFF) * bf16_value(b >> s & 0xFFFF)) for s in (0, 16))
    return low | high << 16


def permute(a: int, b: int, selector: int) -> int:
    source = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]
    return sum(source[selector >> 4 * i & 7] << 8 * i for i in range(4))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "bfe.u32": lambda a, start, length: a >> start & (1 << length) - 1,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": permute,
    "mul.bf16x2": multiply_pairs,
}


def assembly(name: str) -> str:
    (text,) = re.findall(r'"""\{(.*?)\}"""', (CUDA / name).read_text(), re.DOTALL)
    return text


def execute(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Registers after straight-line PTX."""
    registers = dict(registers)
    for line in filter(None, (part.strip() for part in text.split(";"))):
        if line.startswith(".reg"):
            continue
        halves = re.fullmatch(r"mov\.b32 \{(\$\d), (\$\d)\}, (\w+)", line)
        if halves:
            bits = registers[halves[3]]
            registers[halves[1]], registers[halves[2]] = bits & 0xFFFF, bits >> 16
            continue
        name, operands = line.split(" ", 1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = OPERATIONS[name](*values)
    return registers


@pytest.mark.parametrize("scale_byte", [70, 110, 127, 140, 189])
def test_words_of_eight(scale_byte: int):
    """moe.py: values times their scale times 2^-63, in the order of the nibbles."""
    half = scale_byte + 63 << 7
    for word in map(int, RNG.integers(0, 2**32, 100)):
        registers = execute(assembly("moe.py"), {"$8": word, "$9": half | half << 16})
        for i in range(8):
            expected = value_of(word >> 4 * i & 15) * 2.0 ** (scale_byte - 127)
            assert bf16_value(registers[f"${i}"]) * 2.0**63 == expected


def test_four_bytes():
    """formats.py: the low and the high codes of four bytes, each byte with a scale of its own."""
    for word in map(int, RNG.integers(0, 2**32, 100)):
        scales = [bf16_bits(2.0 ** RNG.integers(-20, 20) * (1 + RNG.integers(0, 8) / 8)) for _ in range(4)]
        inputs = {"$4": word, "$5": scales[0] | scales[1] << 16, "$6": scales[2] | scales[3] << 16}
        registers = execute(assembly("formats.py"), inputs)
        for i, scale in enumerate(scales):
            byte = word >> 8 * i & 255
            for first, code in ((0, byte & 15), (2, byte >> 4)):
                bits = registers[f"${first + i // 2}"] >> 16 * (i % 2) & 0xFFFF
                assert bf16_value(bits) == bf16_value(bf16_bits(value_of(code) * bf16_value(scale)))
