"""PTX that rounds to FP4, apart from Triton so that a test can run it anywhere."""


def e2m1_pairs_assembly() -> str:
    """Four words of pairs $1..$4, twice their scale in $5..$8 (all the same) -> four bytes in $0.

    Two values at a time: a scale times a threshold has at most 7 bits, so comparisons in BF16 are exact.
    """
    thresholds = {"a": "3E80", "b": "3F40", "c": "3FA0", "d": "3FE0", "e": "4020", "f": "4060", "g": "40A0"}
    lines = [".reg .b32 a, b, c, d, e, f, g, signs, size, upper, middle, low, word0, word1, word2, word3;"]
    lines += [f"mov.b32 {name}, 0x{bits}{bits};\nmul.bf16x2 {name}, {name}, $5;" for name, bits in thresholds.items()]
    lines += ["set.eq.u32.bf16x2 signs, $5, $5;", "and.b32 signs, signs, 0x08080808;"]  # none where the scale is NaN
    for i in range(4):
        word = f"word{i}"
        lines += [
            f"and.b32 size, ${i + 1}, 0x7FFF7FFF;",
            "set.ge.u32.bf16x2 upper, size, d;",
            "lop3.b32 middle, upper, f, b, 0xCA;",  # the second where bits of the first are set, else the third
            "set.ge.u32.bf16x2 middle, size, middle;",
            "lop3.b32 low, middle, g, e, 0xCA;",
            f"lop3.b32 {word}, middle, c, a, 0xCA;",
            f"lop3.b32 low, upper, low, {word}, 0xCA;",
            "set.gt.u32.bf16x2 low, size, low;",
            f"and.b32 {word}, upper, 0x00040004;",
            f"lop3.b32 {word}, middle, 0x00020002, {word}, 0xEA;",  # the first and the second, or the third
            f"lop3.b32 {word}, low, 0x00010001, {word}, 0xEA;",
        ]
    for first, second in ((0, 1), (2, 3)):  # codes of low halves in the low bytes, then those of high halves
        word = f"word{first}"
        lines += [
            f"mad.lo.u32 {word}, word{second}, 256, {word};",
            f"prmt.b32 low, ${first + 1}, ${second + 1}, 0x7351;",
            "shr.u32 low, low, 4;",
            f"lop3.b32 {word}, low, signs, {word}, 0xEA;",
            f"shr.u32 low, {word}, 12;",
            f"or.b32 {word}, {word}, low;",
        ]
    lines += ["prmt.b32 $0, word0, word2, 0x5410;"]
    return "{\n" + "\n".join(lines) + "\n}"
