"""FP8, FP4 and E8M0 against brute force over every code point (spec: model, sections 2, 3 and 7)."""

import math

import numpy as np
import pytest
import torch

from deepinfer.kernels.reference import quant

RNG = np.random.default_rng(0)


# ------------------------------------------------------------------ oracles, in numpy float64


def e4m3_values() -> np.ndarray:
    """Magnitudes of codes 0..126: 4 exponent bits (bias 7), 3 mantissa bits; code 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def e2m1_values() -> np.ndarray:
    """Magnitudes of codes 0..7: 2 exponent bits (bias 1), 1 mantissa bit."""
    code = np.arange(8)
    exponent, mantissa = code >> 1, code & 1
    return np.where(exponent == 0, mantissa * 0.5, (2 + mantissa) * 2.0 ** (exponent - 2.0))


def nearest_code(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the value nearest to |x|, the even index on a tie, the last one above the range."""
    distance = np.abs(np.minimum(np.abs(x), values[-1])[..., None] - values)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    even = tied & (np.arange(len(values)) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.copysign(values[nearest_code(x, values)], x)


def probes(values: np.ndarray) -> np.ndarray:
    """Every value, every midpoint, their float32 neighbours, the outside, and random numbers; both signs."""
    points = np.concatenate((values, (values[1:] + values[:-1]) / 2)).astype(np.float32)
    around = np.concatenate((points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))))
    outside = np.array([values[-1] * 1.04, values[-1] * 2, 1e30, 1e-30], dtype=np.float32)
    spread = (RNG.standard_normal(5000) * values[-1] / 3).astype(np.float32)
    every = np.concatenate((around, outside, spread, spread * 1e-3))
    return np.concatenate((every, -every)).astype(np.float32)


def ceil_log2(x: float) -> int:
    """Exact, from the mantissa and exponent of a Python float."""
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent


# ------------------------------------------------------------------ numbers


def test_e4m3_takes_the_nearest_value_ties_to_even():
    x = probes(e4m3_values())
    got = quant.e4m3_round(torch.from_numpy(x)).double().numpy()
    want = nearest(x.astype(np.float64), e4m3_values())
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_e2m1_takes_the_nearest_value_ties_to_even():
    x = probes(e2m1_values())
    wide = x.astype(np.float64)
    want_code = nearest_code(wide, e2m1_values()) | np.signbit(x) * 8
    np.testing.assert_array_equal(quant.e2m1_code(torch.from_numpy(x)).numpy(), want_code)
    np.testing.assert_array_equal(quant.e2m1_round(torch.from_numpy(x)).double().numpy(), nearest(wide, e2m1_values()))


def test_e2m1_code_points():
    codes = torch.arange(16, dtype=torch.uint8)
    values = quant.e2m1_value(codes, torch.float64)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert math.copysign(1, values[8]) == -1
    assert torch.equal(quant.e2m1_code(values), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_exact_for_every_e8m0_byte(dtype):
    exponent = torch.arange(255) - 127
    assert quant.exp2_int(exponent, dtype).tolist() == [math.ldexp(1.0, e) for e in range(-127, 128)]
    bytes_as_e8m0 = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(quant.exp2_int(exponent, torch.float32), bytes_as_e8m0.float())


def test_ceil_log2_is_exact_around_powers_of_two():
    powers = np.exp2(np.arange(-126, 128, dtype=np.float64)).astype(np.float32)
    x = np.concatenate((powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))))
    got = quant.ceil_log2(torch.from_numpy(x))
    assert got.tolist() == [ceil_log2(float(value)) for value in x]


def test_nibbles_low_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = quant.pack_nibbles(codes)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(quant.unpack_nibbles(packed), codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(quant.pack_nibbles(quant.unpack_nibbles(every)), every)


# ------------------------------------------------------------------ group scales and round trips


def groups(shape: tuple[int, ...], group: int) -> np.ndarray:
    """Rows whose groups have very different magnitudes, plus all-zero, constant, tiny and huge groups."""
    x = RNG.standard_normal(shape).astype(np.float32)
    split = x.reshape(-1, group)
    split *= np.exp2(RNG.integers(-20, 12, size=(len(split), 1))).astype(np.float32)
    for row, scale in enumerate((0.0, 1e-30, 1e-9, 1e4)):
        if row < len(split):
            split[row] *= np.float32(scale)
    split[-1] = -448.0 if len(split) > 5 else split[-1]
    return x


def fp8_oracle(x: np.ndarray, group: int) -> np.ndarray:
    out = np.empty(x.shape, np.float64).reshape(-1, group)
    for row, values in enumerate(x.reshape(-1, group)):
        amax = max(np.abs(values).max(), np.float32(1e-4))
        bits = np.array(amax * np.float32(1 / 448), np.float32).view(np.uint32)  # the rule of section 3, on the bits
        scale = 2.0 ** (int(bits >> 23) - 127 + bool(bits & 0x7FFFFF))
        out[row] = nearest(np.clip(values.astype(np.float64) / scale, -448, 448), e4m3_values()) * scale
    return out.reshape(x.shape)


def mxfp4_oracle(x: np.ndarray, group: int) -> np.ndarray:
    out = np.empty(x.shape, np.float64).reshape(-1, group)
    for row, values in enumerate(x.reshape(-1, group)):
        amax = max(float(np.abs(values).max()), 6 * 2.0**-126)
        scale = 2.0 ** ceil_log2(amax / 6)
        out[row] = nearest(values.astype(np.float64) / scale, e2m1_values()) * scale
    return out.reshape(x.shape)


def nvfp4_oracle(x: np.ndarray, group: int) -> np.ndarray:
    out = np.empty(x.shape, np.float64).reshape(-1, group)
    for row, values in enumerate(x.reshape(-1, group)):
        amax = max(np.abs(values).max(), np.float32(6 * 2.0**-9))
        scale = nearest(np.array([np.float32(amax / np.float32(6))], np.float64), e4m3_values())[0]
        out[row] = nearest((values / np.float32(scale)).astype(np.float64), e2m1_values()) * scale
    return out.reshape(x.shape)


FORMATS = {
    "fp8": (quant.fp8_round_trip, quant.pack_fp8_row, quant.unpack_fp8_row, fp8_oracle, 32),
    "mxfp4": (quant.mxfp4_round_trip, quant.pack_mxfp4_row, quant.unpack_mxfp4_row, mxfp4_oracle, 32),
    "nvfp4": (quant.nvfp4_round_trip, quant.pack_nvfp4_row, quant.unpack_nvfp4_row, nvfp4_oracle, 16),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 32), (7, 64), (2, 3, 128), (4, 512)])
def test_round_trip_equals_brute_force(name, shape):
    round_trip, _, _, oracle, group = FORMATS[name]
    x = groups(shape, group)
    got = round_trip(torch.from_numpy(x))
    assert got.dtype == torch.float32 and got.shape == shape
    np.testing.assert_array_equal(got.double().numpy(), oracle(x, group))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pack_then_unpack_equals_the_round_trip(name, dtype):
    round_trip, pack, unpack, _, group = FORMATS[name]
    for shape in ((32,), (5, 64), (2, 3, 512)):
        x = torch.from_numpy(groups(shape, group)).to(dtype)
        row = pack(x)
        assert row.dtype == torch.uint8 and row.shape[:-1] == x.shape[:-1]
        back = unpack(row, shape[-1], dtype)
        assert back.dtype == dtype and torch.equal(back, round_trip(x))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero(name):
    round_trip, pack, unpack, _, _ = FORMATS[name]
    zeros = torch.zeros(3, 64)
    assert torch.equal(round_trip(zeros), zeros)
    assert torch.equal(unpack(pack(zeros), 64, torch.float32), zeros)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_power_of_two_scales_make_the_round_trip_idempotent(name):
    round_trip, _, _, _, group = FORMATS[name]
    once = round_trip(torch.from_numpy(groups((50, 128), group)))
    assert torch.equal(round_trip(once), once)


def test_row_sizes_of_the_public_model():
    assert quant.pack_nvfp4_row(torch.randn(2, 512)).shape == (2, 288)
    assert quant.pack_mxfp4_row(torch.randn(2, 128)).shape == (2, 68)
    assert quant.pack_fp8_row(torch.randn(2, 512)).shape == (2, 528)


def test_row_bytes_of_known_values():
    x = torch.zeros(32)
    x[0], x[1], x[31] = 6.0, -0.5, 3.0
    mxfp4 = quant.pack_mxfp4_row(x).tolist()
    assert mxfp4[0] == 0x97 and mxfp4[15] == 0x50 and mxfp4[16] == 127  # scale 2^0
    nvfp4 = quant.pack_nvfp4_row(x).tolist()
    assert nvfp4[0] == 0x97 and nvfp4[15] == 0x70  # second group: 3 is its maximum, so code 7 (6.0) of scale 0.5
    assert nvfp4[16:] == [0x38, 0x30]  # E4M3 of 1.0 and 0.5
    fp8 = quant.pack_fp8_row(x * 64).tolist()
    assert fp8[0] == 0x7C and fp8[32] == 127  # 384 = 1.5 * 2^8, scale 2^0


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (24, 160), (71, 96), (1, 32)])
def test_fp8_weight_has_one_scale_a_block(shape):
    rows, cols = shape
    weight = (RNG.standard_normal(shape) * np.exp2(RNG.integers(-12, 6, size=shape))).astype(np.float32)
    values, scale = quant.quantize_fp8_weight(torch.from_numpy(weight))
    assert values.dtype == torch.float8_e4m3fn and values.shape == shape
    assert scale.dtype == torch.uint8 and scale.shape == (-(-rows // 32), cols // 32)
    want = np.empty(shape)
    for i in range(0, rows, 32):
        for k in range(0, cols, 32):
            block = weight[i : i + 32, k : k + 32].astype(np.float64)
            exponent = ceil_log2(float(np.float32(np.abs(block).max()) * np.float32(1 / 448)))
            assert scale[i // 32, k // 32] == exponent + 127
            want[i : i + 32, k : k + 32] = nearest(block / 2.0**exponent, e4m3_values()) * 2.0**exponent
    for scales in (scale, scale.view(torch.float8_e8m0fnu)):
        got = quant.dequantize_fp8_weight(values, scales, torch.float32)
        np.testing.assert_array_equal(got.double().numpy(), want)


@pytest.mark.parametrize("shape", [(1, 32), (7, 64), (40, 96)])
def test_fp4_weight_has_one_scale_a_row_and_32_columns(shape):
    rows, cols = shape
    weight = groups(shape, 32)
    packed, scale = quant.quantize_fp4_weight(torch.from_numpy(weight))
    assert packed.dtype == torch.int8 and packed.shape == (rows, cols // 2)
    assert scale.dtype == torch.uint8 and scale.shape == (rows, cols // 32)
    for stored in (packed, packed.view(torch.uint8)):
        got = quant.dequantize_fp4_weight(stored, scale, torch.float32)
        np.testing.assert_array_equal(got.double().numpy(), mxfp4_oracle(weight, 32))


def test_every_fp4_byte_and_scale_decodes_by_the_definition():
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.arange(100, 116, dtype=torch.uint8).reshape(16, 1)
    got = quant.dequantize_fp4_weight(packed, scale, torch.float64).numpy()
    for row in range(16):
        for byte in range(16):
            for half in range(2):
                nibble = (packed[row, byte].item() >> (4 * half)) & 15
                value = e2m1_values()[nibble & 7] * (-1 if nibble & 8 else 1) * 2.0 ** (100 + row - 127)
                assert got[row, 2 * byte + half] == value


def test_dequantised_weights_are_exact_in_bf16():
    weight = torch.from_numpy(groups((64, 128), 32))
    fp8, fp4 = quant.quantize_fp8_weight(weight), quant.quantize_fp4_weight(weight)
    for dequantize, stored in ((quant.dequantize_fp8_weight, fp8), (quant.dequantize_fp4_weight, fp4)):
        assert torch.equal(dequantize(*stored, torch.bfloat16).float(), dequantize(*stored, torch.float32))


def test_zero_weights_stay_zero():
    zeros = torch.zeros(40, 64)
    assert torch.equal(quant.dequantize_fp8_weight(*quant.quantize_fp8_weight(zeros), torch.float32), zeros)
    assert torch.equal(quant.dequantize_fp4_weight(*quant.quantize_fp4_weight(zeros), torch.float32), zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_group_with_nan_reads_back_as_nan_and_its_neighbours_as_they_were(name, value, dtype):
    round_trip, pack, unpack, _, group = FORMATS[name]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    broken = x.clone()
    broken[1, 70] = value
    expected, got = round_trip(x), round_trip(broken)
    hit = torch.zeros(3, 128, dtype=torch.bool)
    hit[1, 70 // group * group : (70 // group + 1) * group] = True
    assert torch.equal(got[~hit], expected[~hit])
    if name == "nvfp4" and math.isinf(value):  # E4M3 has no infinity, nor has the rounding to it: it saturates
        assert got[1, 70] == math.copysign(448.0 * 6.0, value)
    else:
        assert bool(got[hit].isnan().all())
    stored = unpack(pack(broken), 128, dtype)
    assert bool(((stored == got) | (stored.isnan() & got.isnan())).all())


def test_the_e8m0_byte_255_is_nan():
    scale = torch.tensor([[255]], dtype=torch.uint8)
    ones = torch.ones(1, 32).to(torch.float8_e4m3fn)
    assert bool(quant.dequantize_fp8_weight(ones, scale, torch.float32).isnan().all())
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    assert bool(quant.dequantize_fp4_weight(packed, scale, torch.bfloat16).isnan().all())
