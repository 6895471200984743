"""The same C sources for less of a machine agree with the references: plain C without vector instructions, and AVX2."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch

from deepinfer.kernels.cpu import build, library
from deepinfer.kernels.cpu.int8 import multiplies_int8
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import OPERATIONS
from tests.kernels.cases import CASES
from tests.kernels.test_ops_backends import compare, copied

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler here")
NAMES = sorted(name for name, op in OPERATIONS.items() if "cpu" in op.backends)
NEED_VNNI = ("chain_drafts", "linear_int8")
NATIVE, PLAIN = 0, len(build.VARIANTS) - 1
PATHS = [pytest.param(None, id="native"), pytest.param(("", PLAIN), id="plain")]
if platform.machine() == "x86_64":
    PATHS.append(pytest.param((" -mno-avx512f", NATIVE), id="avx2"))


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The backends run a library that was compiled for this path; native: the one that they always run."""
    if request.param is None:
        yield
        return
    flags, variant = request.param
    compiler = build.find_compiler()
    assert compiler is not None
    target = tmp_path_factory.mktemp("kernels") / "kernels.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", " ".join(compiler) + flags)
        build.build(variant, target)
        opened = ctypes.CDLL(str(target)), library.Status(True, str(target))
        patch.setattr(library, "_open", lambda: opened)
        library.functions.cache_clear()
        yield
    library.functions.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_reference(path: None, name: str):
    covered = 0
    for case in CASES[name](torch.Generator().manual_seed(0)):
        ours, theirs = [copied(a) for a in case], [copied(a) for a in case]
        result = OPERATIONS[name].backends["cpu"](*ours)
        if result is NotImplemented:
            continue
        covered += 1
        expected = OPERATIONS[name].reference(*theirs)
        if name.startswith("moe_experts") and case[-1]:  # a last bit may round an activation to the next FP8 value
            assert (result - expected).norm() <= 2e-3 * expected.norm()
        else:
            compare(name, result, expected)
    assert covered or (name in NEED_VNNI and not multiplies_int8())


@pytest.mark.parametrize("row_format", RowFormat)
def test_every_byte_is_decoded(path: None, row_format: RowFormat):
    """All codes under all scales of a packed row: NaN, subnormal values and the largest scale among them."""
    dim = 256 if row_format is RowFormat.FP8 else 32
    rows = torch.empty(256, 1, row_format.row_bytes(dim), dtype=torch.uint8)
    values = dim if row_format is RowFormat.FP8 else dim // 2
    rows[:, 0, :values] = torch.arange(values, dtype=torch.uint8) * (1 if values == 256 else 17)
    rows[:, 0, values:] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    arguments = rows, torch.arange(256), row_format, dim, torch.float32
    compare(
        "load_rows",
        OPERATIONS["load_rows"].backends["cpu"](*arguments),
        OPERATIONS["load_rows"].reference(*arguments),
    )
