"""The PTX that widens FP4 and rounds to it, run in Python instruction by instruction, is exact."""

from __future__ import annotations

import operator
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.kernels.reference.quant import e2m1_code

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


def compare_pairs(compare):
    def run(a: int, b: int) -> int:
        return sum(0xFFFF << s for s in (0, 16) if compare(bf16_value(a >> s & 0xFFFF), bf16_value(b >> s & 0xFFFF)))

    return run


def three_inputs(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "bfe.u32": lambda a, start, length: a >> start & (1 << length) - 1,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": permute,
    "mul.bf16x2": multiply_pairs,
    "shr.u32": lambda a, b: a >> b,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "lop3.b32": three_inputs,
    "set.ge.u32.bf16x2": compare_pairs(operator.ge),
    "set.gt.u32.bf16x2": compare_pairs(operator.gt),
    "set.eq.u32.bf16x2": compare_pairs(operator.eq),
}


def assembly(name: str) -> str:
    (text,) = re.findall(r'"""\{(.*?)\}"""', (CUDA / name).read_text(), re.DOTALL)
    return text


def execute(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Registers after straight-line PTX."""
    registers = dict(registers)
    for line in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
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


def test_rounds_pairs():
    """fp4_assembly.py: eight BF16 numbers over one scale; thresholds, infinities and a scale that is NaN among them."""
    text = runpy.run_path(str(CUDA / "fp4_assembly.py"))["e2m1_pairs_assembly"]().strip("{}\n")
    scales = [bf16_bits(2.0 ** RNG.integers(-6, 9) * (1 + RNG.integers(0, 8) / 8)) for _ in range(100)]
    for scale in (*scales, 0x0080, 0x7E00, 0x7FC0):
        wide = bf16_value(scale)
        exact = [bf16_bits(t * wide) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)]
        drawn = [bf16_bits(wide * RNG.normal() * 3) for _ in range(21)] + [0, 0x8000, 0x7F80, 0xFF80]
        near = [bits + step for bits in exact for step in (-1, 0, 1)] if wide == wide else exact
        numbers = RNG.choice([*near, *(bits ^ 0x8000 for bits in near), *drawn], 8)
        words = [int(low) | int(high) << 16 for low, high in numbers.reshape(4, 2)]
        registers = execute(text, {**{f"${i + 1}": w for i, w in enumerate(words)}, "$5": scale | scale << 16})
        codes = [registers["$0"] >> 4 * i & 15 for i in range(8)]
        if wide != wide:
            assert codes == [0] * 8
            continue
        values = torch.tensor([bf16_value(int(bits)) for bits in numbers])
        expected = e2m1_code(values / torch.tensor(wide))
        assert codes == expected.tolist()
