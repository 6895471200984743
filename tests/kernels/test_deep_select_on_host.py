"""The CUDA C++ selection compiled for the CPU, its threads as fibers, against the reference: no GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kernels.deep_jit import Build
from deepinfer.kernels.deep_select import gate, top_k
from deepinfer.kernels.reference.hyper_connection import hc_post, hc_pre
from deepinfer.kernels.reference.indexer import top_k_positions
from deepinfer.kernels.reference.moe import moe_gate
from deepinfer.kernels.tile_kernels import hyper_connection, mix_streams
from tests.kernels.cases import CASES, INF, NAN, hc_mix, normal

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SOURCE = """
#include "{file}"
extern "C" bool on_host(const {params}* p, int ranks, int rows, int shared_bytes) {{
    return run(ranks, rows, THREADS, shared_bytes, [=] {{ {name}(*p); }});
}}
"""


def check_ended(ended: bool, *_: Any) -> None:
    assert ended, "threads wait for each other for ever"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Build, str], Any]:
    """Compile a kernel for the CPU: a function of its arguments, blocks of a cluster, clusters and shared memory."""
    folder = tmp_path_factory.mktemp("select")
    shutil.copy(Path(__file__).parent / "cluster_on_host.cuh", folder / "cluster.cuh")
    built: dict[str, Any] = {}

    def compile_for_host(build: Build, params: str) -> Any:
        macros = [f"-D{name}={value}" for name, value in build.defines.items()]
        name = "".join([build.name, *macros])
        if name not in built:
            for source in (*build.source.parent.glob("*.cu*"), *Path(top_k.__file__).parent.glob("*.cuh")):
                if source.name != "cluster.cuh":
                    text = source.read_text().replace("../deep_select/", "")
                    (folder / source.name).write_text(text)
            (folder / "host.cpp").write_text(SOURCE.format(name=build.name, file=build.source.name, params=params))
            command = [str(COMPILER), "-O1", "-std=c++17", "-w", "-shared", "-fPIC", *macros, "host.cpp"]
            answer = subprocess.run([*command, "-o", f"{name}.so"], cwd=folder, capture_output=True, text=True)
            assert answer.returncode == 0, answer.stderr[:3000]
            built[name] = ctypes.CDLL(str(folder / f"{name}.so")).on_host
            built[name].restype, built[name].errcheck = ctypes.c_bool, check_ended
        return built[name]

    return compile_for_host


@pytest.fixture(scope="module")
def select(compiled) -> Callable[..., torch.Tensor]:
    def run(
        scores: torch.Tensor,
        k: int,
        row_k: torch.Tensor | None = None,
        cluster: int = 8,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        chosen = top_k.plan(scores.shape[1], k, cluster)
        assert chosen is not None
        out = torch.full((len(scores), k), -7, dtype=torch.int32)
        parameters = top_k.parameters(scores, k, row_k, ends, out, chosen)
        on_host = compiled(top_k.build(scores.dtype is torch.bfloat16, chosen), "Params")
        on_host(ctypes.byref(parameters), chosen.cluster, len(scores), chosen.shared_bytes)
        return out

    return run


def scores_of(kind: str, n: int, width: int) -> torch.Tensor:
    scores = normal(torch.Generator().manual_seed(width), n, width)
    column = torch.arange(width)
    if kind == "tied":
        return scores.mul(8).round()
    if kind == "short":  # few above -inf, all of them at the start
        return scores.masked_fill(column >= min(700, width // 2), -INF)
    if kind == "plateau":  # fewer than k above many equal ones
        return scores.clamp_min(2.0)
    if kind == "zeros":
        return torch.where(column % 2 == 0, 0.0, -0.0).expand(n, -1).contiguous()
    if kind == "broken":
        scores = torch.where(column % 97 < 2, torch.where(column % 97 == 0, NAN, -NAN), scores)
        return torch.where(column % 31 == 5, INF, scores)
    return scores


@pytest.mark.parametrize("kind", ["normal", "tied", "short", "zeros", "broken"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "k"), [(3, 33, 40), (1, 8191, 512), (1, 20001, 512), (1, 40000, 1500)])
def test_selects_as_a_stable_sort(select, n: int, width: int, k: int, kind: str, dtype: torch.dtype):
    """Narrow rows by one block, wide ones by a cluster; zeros overflow the lists of a cluster."""
    scores = scores_of(kind, n, width).to(dtype)
    assert torch.equal(select(scores, k), top_k_positions.reference(scores, k))


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("kind", ["normal", "tied", "short", "plateau", "zeros", "broken"])
def test_few_large_blocks(select, cluster: int, kind: str):
    scores = scores_of(kind, 2, 9000).bfloat16()
    assert torch.equal(select(scores, 512, None, cluster), top_k_positions.reference(scores, 512))


@pytest.mark.parametrize("kind", ["tied", "zeros"])
@pytest.mark.parametrize("width", [9000, 700])
def test_rows_with_ends(select, width: int, kind: str):
    """Whatever is behind them, NaN among it."""
    ends = torch.tensor([0, 1, 331, width - 1, width, width + 5], dtype=torch.int32)
    hidden = torch.arange(width) >= ends.unsqueeze(1)
    scores = scores_of(kind, len(ends), width)
    expected = top_k_positions.reference(scores.masked_fill(hidden, -INF), 300)
    behind = torch.where(torch.arange(width) % 2 == 0, INF, NAN)
    assert torch.equal(select(torch.where(hidden, behind, scores), 300, ends=ends), expected)


@pytest.mark.parametrize(("visible", "k"), [(3000, 512), (5000, 512), (5000, 2048), (12000, 2048)])
def test_short_contexts_in_wide_rows(select, visible: int, k: int):
    scores = scores_of("normal", 1, 33000)
    scores[:, visible:] = -INF
    assert torch.equal(select(scores, k), top_k_positions.reference(scores, k))


def test_more_than_one_chunk_a_block(select):
    scores = scores_of("normal", 1, 140_000).bfloat16()
    assert torch.equal(select(scores, 512), top_k_positions.reference(scores, 512))


def test_rows_that_are_not_aligned_and_a_number_for_each(select):
    scores = scores_of("tied", 3, 9003)[:, 2:9001]
    counts = torch.tensor([1, 30, 70])
    result = select(scores, 60, counts)
    for row, count in enumerate(counts.tolist()):
        expected = top_k_positions.reference(scores[row : row + 1], min(count, 60))[0]
        assert torch.equal(result[row, : len(expected)], expected)
        assert bool((result[row, len(expected) :] == -1).all())


def test_gate(compiled):
    """Blocks one after the other, each with several rows a warp; equal experts in their order."""
    cases = list(CASES["moe_gate"](torch.Generator().manual_seed(0)))
    cases.append((torch.zeros(3, 100), torch.zeros(100), 8, True, 2.5))
    g = torch.Generator().manual_seed(1)
    cases.append((normal(g, 20, 384).round(), torch.zeros(384), 6, True, 2.5))
    cases.append((normal(g, 31, 384) * 3, normal(g, 31, 384), 6, True, 2.5))  # an odd number of rows, a bias for each
    mixed = normal(g, 9, 128)
    mixed[2], mixed[3, 7], mixed[5] = 0.5, NAN, -INF  # beside rows that need no more than their best
    cases.append((mixed, normal(g, 128).round(), 8, True, 1.0))
    cases.append((normal(g, 20, 384) * 60, normal(g, 384), 6, False, 1.0))  # some scores are infinite at first
    cases.append((normal(g, 20, 384).masked_fill(torch.arange(384) % 3 > 0, -INF), normal(g, 384), 6, True, 1.0))
    for logits, bias, k, normalise, scaling in cases:
        logits = logits.contiguous()
        chosen, gates = torch.full((len(logits), k), -7, dtype=torch.int32), torch.full((len(logits), k), -7.0)
        arguments = gate.parameters(logits, bias, chosen, gates, normalise, scaling)
        on_host = compiled(gate.build(logits.shape[1], k), "GateParams")
        if len(logits):
            on_host(ctypes.byref(arguments), -(-len(logits) // gate.ROWS), 1, gate.SHARED_BYTES)
        expected = moe_gate.reference(logits, bias, k, normalise, scaling)
        assert torch.equal(chosen, expected[0])
        torch.testing.assert_close(gates, expected[1], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("n", "dim", "cluster", "tokens"), [(1, 384, 8, 1), (3, 384, 8, 2), (5, 64, 8, 4), (2, 2048, 8, 1)]
)
@pytest.mark.parametrize("after_sub_layer", [True, False])
def test_hyper_connection(compiled, n: int, dim: int, cluster: int, tokens: int, after_sub_layer: bool):
    g = torch.Generator().manual_seed(dim + n)
    h, y = normal(g, n, 4, dim).bfloat16(), normal(g, n, dim).bfloat16()
    comb = torch.rand(n, 4, 4, generator=g)
    p_prev, fn, scale, base, norm, *constants = hc_mix(g, n, 4, dim)
    norm = norm.bfloat16()
    mix = (y, normal(g, n, 4), comb) if after_sub_layer else None
    after = torch.full_like(h, torch.nan) if mix else h
    shapes = ((n, 4), (n, 4), (n, 4, 4))
    outputs = (after, torch.full_like(y, torch.nan), *(torch.full(shape, torch.nan) for shape in shapes))
    arguments = hyper_connection.parameters(h, mix, p_prev, (fn, scale, base, norm), tuple(constants), outputs)
    on_host = compiled(hyper_connection.build(dim, cluster, tokens), "MixParams")
    on_host(ctypes.byref(arguments), cluster, -(-n // tokens), hyper_connection.shared_bytes(dim, cluster, tokens))
    weights = (p_prev, fn, scale, base, norm.float(), *constants)
    if mix:
        before = hc_post.reference(h.float(), *(t.float() for t in mix)).bfloat16()
        torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    expected = hc_pre.reference(after.float(), *weights)
    torch.testing.assert_close(outputs[1].float(), expected[0], rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(outputs[2:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "dim", "blocks"), [(5, 512, 1), (150, 512, 1), (40, 1024, 2)])
@pytest.mark.parametrize("after_sub_layer", [True, False])
def test_hyper_connection_of_many_tokens(compiled, n: int, dim: int, blocks: int, after_sub_layer: bool):
    """All slices' blocks run in turns, each warp one or two times."""
    g = torch.Generator().manual_seed(dim + n)
    h, y = normal(g, n, 4, dim).bfloat16(), normal(g, n, dim).bfloat16()
    mix = (y, normal(g, n, 4), torch.rand(n, 4, 4, generator=g)) if after_sub_layer else None
    p_prev, fn, scale, base, norm, *constants = hc_mix(g, n, 4, dim)
    norm = norm.bfloat16()
    after = torch.full_like(h, torch.nan) if mix else h
    shapes = ((n, 4), (n, 4), (n, 4, 4))
    outputs = (after, torch.full_like(y, torch.nan), *(torch.full(shape, torch.nan) for shape in shapes))
    scratch = mix_streams.scratch(n, h.device)
    scratch[0].fill_(torch.nan)
    weights = (fn, scale, base, norm)
    arguments = mix_streams.parameters(h, mix, p_prev, weights, tuple(constants), outputs, scratch, blocks)
    on_host = compiled(mix_streams.build(dim, mix is not None), "StreamParams")
    on_host(ctypes.byref(arguments), mix_streams.SLICES * blocks, 1, mix_streams.shared_bytes(dim))
    if mix:
        before = hc_post.reference(h.float(), *(t.float() for t in mix)).bfloat16()
        torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    expected = hc_pre.reference(after.float(), p_prev, fn, scale, base, norm.float(), *constants)
    torch.testing.assert_close(outputs[1].float(), expected[0], rtol=2e-2, atol=1e-2)
    for ours, theirs in zip(outputs[2:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
