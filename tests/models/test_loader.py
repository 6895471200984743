"""What the loader accepts, and how it refuses what is wrong (spec: model, section 2)."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.ops import RowFormat
from deepinfer.kernels.reference.quant import dequantize_fp8_weight
from deepinfer.models import loader
from deepinfer.models.checkpoint_format import parameter_specs
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.loader import (
    is_engram_table,
    is_routed_expert,
    is_text,
    load_packed_tables,
    load_quantized,
    load_weights,
)
from deepinfer.models.registry import build_deepseek_v41
from deepinfer.models.writer import write_synthetic
from tests.configs import TINY_VISION, tiny_config, tiny_token_map

CONFIG = tiny_config(2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source")
    write_synthetic(path, CONFIG, seed=0, max_shard_bytes=1_000_000)
    return path


@pytest.fixture(scope="module")
def weights(source):
    return load_weights(source, CONFIG)


@pytest.fixture
def copy(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites a checkpoint as one model.safetensors after `change` to its stored tensors."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (path / INDEX).unlink()
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# ------------------------------------------------------------------ accepted forms


def test_single_file_without_index(copy, weights):
    edit(copy, lambda tensors: None)
    assert_same(load_weights(copy, CONFIG), weights)


def test_scales_and_packed_values_as_uint8(copy, weights):
    def as_bytes(tensors):
        for name, tensor in tensors.items():
            if tensor.dtype in (torch.int8, torch.float8_e8m0fnu):
                tensors[name] = tensor.view(torch.uint8)

    edit(copy, as_bytes)
    assert_same(load_weights(copy, CONFIG), weights)
    stored = load_quantized(copy, CONFIG)
    assert_same({name: tensor.dequantize() for name, tensor in stored.items()}, weights)


def test_wo_a_in_bf16_without_scale(copy, weights):
    def widen(tensors):
        for name in [n for n in tensors if n.endswith("wo_a.weight")]:
            scale = tensors.pop(name.replace("weight", "scale"))
            tensors[name] = dequantize_fp8_weight(tensors[name], scale, torch.bfloat16)

    edit(copy, widen)
    assert_same(load_weights(copy, CONFIG), weights)
    assert load_quantized(copy, CONFIG)["layers.3.attn.wo_a.weight"].storage == "bf16"


def test_only_wo_a_may_be_bf16(copy):
    def widen(tensors):
        tensors.pop("layers.3.attn.wo_b.scale")
        tensors["layers.3.attn.wo_b.weight"] = tensors["layers.3.attn.wo_b.weight"].to(torch.bfloat16)

    edit(copy, widen)
    with pytest.raises(ValueError, match=r"'layers\.3\.attn\.wo_b\.weight' has dtype BF16, expected F8_E4M3"):
        load_weights(copy, CONFIG)


def test_scale_in_another_shard_than_its_weight(copy, weights):
    edit(copy, lambda tensors: None)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    scales = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float8_e8m0fnu}
    values = {name: tensor for name, tensor in tensors.items() if name not in scales}
    save_file(scales, copy / "b.safetensors")
    save_file(values, copy / "a.safetensors")
    weight_map = {name: "b.safetensors" if name in scales else "a.safetensors" for name in tensors}
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_weights(copy, CONFIG), weights)


def test_values_that_wait_for_their_scale_are_copied_once(copy, monkeypatch):
    """However many shards lie between the two."""
    weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
    shards: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "z.safetensors": {}}
    for file in set(weight_map.values()):
        for name, tensor in load_file(copy / file).items():
            scale = tensor.dtype == torch.float8_e8m0fnu
            waits = scale or name.removesuffix("weight") + "scale" in weight_map
            place = "z" if scale else "a" if waits else f"m{hash(name) % 3}"
            shards.setdefault(f"{place}.safetensors", {})[name] = tensor
        (copy / file).unlink()
    for file, tensors in shards.items():
        save_file(tensors, copy / file)
    placed = {name: file for file, tensors in shards.items() for name in tensors}
    (copy / INDEX).write_text(json.dumps({"weight_map": placed}))
    copies, clone = [], Tensor.clone

    def counted(tensor: Tensor, *arguments):
        copies.append(tensor.shape)
        return clone(tensor, *arguments)

    monkeypatch.setattr(Tensor, "clone", counted)
    load_weights(copy, CONFIG)
    assert len(shards) > 3 and len(copies) == len(shards["a.safetensors"])


def test_bf16_keeps_fp32_tensors_and_is_exact_for_quantised_ones(source, weights):
    narrow = load_weights(source, CONFIG, dtype=torch.bfloat16)
    for name, spec in parameter_specs(CONFIG).items():
        assert narrow[name].dtype == (torch.float32 if spec.storage == "f32" else torch.bfloat16)
        assert torch.equal(narrow[name].float(), weights[name]), name
    assert narrow["layers.2.hc_attn_fn"].dtype == torch.float32
    assert narrow["layers.2.ffn.gate.bias"].dtype == torch.float32


def test_include_needs_and_reads_the_named_tensors_only(copy, weights):
    edit(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.1.")])
    loaded = load_weights(copy, CONFIG, include=lambda name: not name.startswith("mtp."))
    assert_same(loaded, {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")})
    with pytest.raises(ValueError, match=r"'mtp\.1\.attn_norm\.weight' is missing"):
        load_weights(copy, CONFIG)


# ------------------------------------------------------------------ stored form


def test_stored_form_dequantises_to_the_loaded_weights(source, weights):
    stored = load_quantized(source, CONFIG)
    assert_same({name: tensor.dequantize() for name, tensor in stored.items()}, weights)
    for name, spec in parameter_specs(CONFIG).items():
        assert stored[name].shape == spec.shape and stored[name].storage == spec.storage
    experts = stored["layers.2.ffn.experts.w1.weight"]
    assert experts.values.dtype == torch.uint8 and experts.values.shape == (8, 64, 64)
    assert experts.scale is not None and experts.scale.dtype == torch.uint8 and experts.scale.shape == (8, 64, 4)
    assert experts.num_bytes == 8 * 64 * (64 + 4)
    assert stored["layers.2.attn.wq_b.weight"].values.dtype == torch.float8_e4m3fn
    assert stored["layers.2.hc_attn_fn"].dequantize(torch.bfloat16).dtype == torch.float32


def test_packed_engram_tables_read_back_as_the_loaded_weights(source, weights):
    packed = load_packed_tables(source, CONFIG)
    assert packed.keys() == {name for name in weights if is_engram_table(name)} and len(packed) == 2
    for name, table in packed.items():
        rows, dim = weights[name].shape
        assert table.dtype == torch.uint8 and table.shape == (1, rows, dim + dim // 32)
        ids = torch.randint(rows, (5, 3), generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            got = ops.load_rows(table, ids, RowFormat.FP8, dim, dtype)
            assert torch.equal(got, weights[name][ids].to(dtype))


def test_a_whole_model_reads_text_tensors_only_and_computes_the_same(tmp_path, monkeypatch):
    """Draft head and image tower stay unread: without them the model is the same, and so are its logits."""
    config = tiny_config(2, vision=TINY_VISION)
    write_synthetic(tmp_path, config, seed=2)
    everything = load_weights(tmp_path, config)
    text = {name: value for name, value in everything.items() if is_text(name)}
    assert {name.split(".")[0] for name in everything.keys() - text.keys()} == {
        "mtp", "vision", "aligner", "image_start", "image_end", "image_newline",
    }  # fmt: skip
    read: list[str] = []
    whole_get = loader._get

    def get(shard, name, *rest):
        read.append(name)
        return whole_get(shard, name, *rest)

    monkeypatch.setattr(loader, "_get", get)
    token_map = torch.from_numpy(tiny_token_map()).long()
    model = build_deepseek_v41(tmp_path, config, token_map, torch.float32, "cpu")
    assert len(read) == len(set(read)) and not any(name.startswith(("mtp.", "vision.", "aligner.")) for name in read)
    plain = DeepseekV41(config, dict(text), token_map)
    inputs = ModelInputs(
        is_prefill=True,
        token_ids=torch.arange(3, 33),
        positions=torch.arange(30),
        query_start=torch.tensor([0, 30], dtype=torch.int32),
        context_lens=torch.tensor([30], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        state_slots=torch.tensor([1], dtype=torch.int32),
        logits_rows=torch.arange(30),
    )
    logits = [m.forward(inputs, m.allocate_caches(2, 32, 2, torch.float32)) for m in (model, plain)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("limit", "on_terminal", "shown"), [(0, True, True), (0, False, False), (1 << 30, True, False)]
)
def test_progress_is_shown_for_big_checkpoints_on_a_terminal(source, monkeypatch, capsys, limit, on_terminal, shown):
    monkeypatch.setattr(loader, "PROGRESS_BYTES", limit)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal, raising=False)
    load_weights(source, CONFIG, include=is_engram_table)
    shards = len(list(source.glob("*.safetensors")))
    text = capsys.readouterr().err
    assert (f"loading weights: shard {shards}/{shards}" in text) == shown and bool(text) == shown


def test_block_rows_beyond_a_multiple_of_32_and_chunks_agree_with_the_whole(monkeypatch):
    """A partial last block of rows, dequantised whole and in chunks of 32 rows."""
    from deepinfer.models import loader
    from deepinfer.models.writer import quantize

    weight = torch.randn(3 * 32 + 7, 64, generator=torch.Generator().manual_seed(0))
    values, scale = quantize("fp8", weight)
    whole = loader.StoredTensor("fp8", values, scale).dequantize()
    monkeypatch.setattr(loader, "CHUNK_VALUES", 1)
    assert torch.equal(loader.StoredTensor("fp8", values, scale).dequantize(), whole)
    assert (whole - weight).abs().max() < weight.abs().max() / 16


# ------------------------------------------------------------------ refused: one line that names the tensor or file


def fails(path: Path, match: str) -> None:
    for load in (load_weights, load_quantized):
        with pytest.raises(ValueError, match=match) as error:
            load(path, CONFIG)
        assert "\n" not in str(error.value)


def test_missing_tensor(copy):
    edit(copy, lambda t: [t.pop("layers.4.ffn.experts.3.w2.scale"), t.pop("layers.7.ffn.gate.bias")])
    fails(copy, r"tensor 'layers\.4\.ffn\.experts\.3\.w2\.scale' is missing from the checkpoint")


def test_extra_tensor(copy):
    edit(copy, lambda t: t.update({"layers.4.attn.stray": torch.zeros(1), "z": torch.zeros(1)}))
    fails(copy, r"tensor 'layers\.4\.attn\.stray' is in the checkpoint but not in the model")


def test_misshapen_tensor(copy):
    edit(copy, lambda t: t.update({"layers.2.attn.q_norm.weight": torch.ones(65, dtype=torch.bfloat16)}))
    fails(copy, r"tensor 'layers\.2\.attn\.q_norm\.weight' has shape \[65\], expected \[64\]")


def test_transposed_tensor(copy):
    edit(copy, lambda t: t.update({"layers.2.attn.wq_a.weight": t["layers.2.attn.wq_a.weight"].T.contiguous()}))
    fails(copy, r"tensor 'layers\.2\.attn\.wq_a\.weight' has shape \[128, 64\], expected \[64, 128\]")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("layers.2.attn.attn_sink", torch.bfloat16, "has dtype BF16, expected F32"),
        ("embed.weight", torch.float32, "has dtype F32, expected BF16"),
        ("layers.2.ffn.experts.0.w1.weight", torch.float8_e4m3fn, "has dtype F8_E4M3, expected I8 or U8"),
        ("layers.2.attn.wkv.scale", torch.float32, "has dtype F32, expected F8_E8M0 or U8"),
    ],
)
def test_wrong_dtype(copy, name, dtype, message):
    edit(copy, lambda t: t.update({name: t[name].float().to(dtype)}))
    fails(copy, f"{name}' {message}")


def test_config_of_another_model(source):
    with pytest.raises(ValueError, match=r"'layers\.0\.ffn\.gate\.weight' has shape \[8, 128\], expected \[16, 128\]"):
        load_weights(source, tiny_config(2, n_routed_experts=16))
    with pytest.raises(ValueError, match=r"'mtp\.0\.attn\.attn_sink' is in the checkpoint but not in the model"):
        load_weights(source, tiny_config(0))


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 0.5, 0.999])
def test_truncated_shard(copy, keep):
    shard = sorted(copy.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    fails(copy, rf"shard .*{shard.name} is truncated or corrupt")


def test_garbage_header(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[8:40] = b"\xff" * 32
    shard.write_bytes(data)
    fails(copy, rf"shard .*{shard.name} is truncated or corrupt")


def test_missing_shard(copy):
    shard = sorted(copy.glob("*.safetensors"))[-1]
    shard.unlink()
    fails(copy, rf"shard .*{shard.name} is missing")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": []}',
        '{"weight_map": {"embed.weight": {"a": 1}}}',
        "\udcff",
    ],
)
def test_bad_index(copy, text):
    (copy / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    fails(copy, r"model\.safetensors\.index\.json")


def test_index_may_not_point_outside_the_folder(copy):
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "../other.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    fails(copy, r"places 'norm\.weight' in '\.\./other\.safetensors', allowed: a file beside the index")


def test_index_and_shard_disagree(copy):
    index = json.loads((copy / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][wrong] = files[1]
    (copy / INDEX).write_text(json.dumps(index))
    fails(copy, rf"{files[0]} holds tensor '{wrong}', which the index does not place there|'{wrong}' is missing from")


def test_the_first_unpromised_tensor_is_named_the_same_in_every_process(copy):
    """Names in a set have no order of their own: the message must not depend on the hash seed."""
    index = json.loads((copy / INDEX).read_text())
    file = sorted(set(index["weight_map"].values()))[0]
    unpromised = sorted(name for name, place in index["weight_map"].items() if place == file)[:8]
    for name in unpromised:
        del index["weight_map"][name]
    (copy / INDEX).write_text(json.dumps(index))
    fails(copy, rf"{file} holds tensor '{unpromised[0]}', which the index does not place there")


def test_no_checkpoint_at_the_path(tmp_path):
    fails(tmp_path, r"neither model\.safetensors\.index\.json nor model\.safetensors in")
    fails(tmp_path / "absent", r"neither model\.safetensors\.index\.json nor model\.safetensors in")


def test_more_experts_than_the_checkpoint_has_end_at_the_first_missing_one(source):
    config = replace(CONFIG, n_routed_experts=1 << 16, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"'layers\.0\.ffn\.experts\.8\.w1\.weight' is missing"):
        load_quantized(source, config, include=is_routed_expert)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["norm.weight", "layers.3.attn.attn_sink", "layers.2.ffn.gate.bias"])
def test_a_vector_that_is_not_finite_is_refused(copy, name, value):
    edit(copy, lambda tensors: tensors[name].__setitem__(3, value))
    for load in (load_weights, load_quantized):
        with pytest.raises(ValueError, match=rf"tensor '{name}' holds NaN or infinity"):
            load(copy, CONFIG)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.scale"),
        ("layers.0.ffn.experts.7.w2.scale", "layers.0.ffn.experts.w2.weight"),
        ("layers.1.engram.embed.scale", "layers.1.engram.embed.scale"),
    ],
)
def test_a_scale_that_is_nan_is_refused(copy, name, named):
    edit(copy, lambda tensors: tensors[name].view(torch.uint8)[-1].fill_(254))
    load_weights(copy, CONFIG)
    edit_single(copy, lambda tensors: tensors[name].view(torch.uint8)[-1, -1:].fill_(255))
    for load in (load_weights, load_quantized):
        with pytest.raises(ValueError, match=rf"tensor '{named}' has scale byte 255, which is NaN"):
            load(copy, CONFIG)


def edit_single(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """`edit` of a checkpoint that is one file already."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
