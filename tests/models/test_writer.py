"""Writing and reading back: values, bytes, shard sizes (spec: model, section 2)."""

import json
import struct

import numpy as np
import pytest
import torch

from deepinfer.config.model import ModelConfig
from deepinfer.models.checkpoint_format import expected_tensors, parameter_shapes, parameter_specs
from deepinfer.models.loader import load_weights
from deepinfer.models.random_weights import random_weights
from deepinfer.models.writer import write_checkpoint, write_synthetic
from tests.configs import TINY_VISION, tiny_config

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3_table() -> np.ndarray:
    """Value of every E4M3 byte, by definition: 4 exponent bits (bias 7), 3 mantissa bits, no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -value, value)


def raw_shard(path) -> dict[str, tuple[dict, bytes]]:
    """safetensors by hand: name -> (header entry, bytes)."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: (entry, body[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def read_all(folder) -> dict[str, tuple[dict, bytes]]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        shard = raw_shard(folder / file)
        assert all(index["weight_map"][name] == file for name in shard)
        tensors.update(shard)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, data in tensors.values())
    return tensors


def decode(name: str, spec, tensors) -> np.ndarray:
    """Float64 values of one stored weight, decoded from the file bytes with numpy alone."""
    entry, data = tensors[name]
    if spec.storage == "f32":
        return np.frombuffer(data, "<f4").reshape(spec.shape).astype(np.float64)
    if spec.storage == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(spec.shape).astype(np.float64)
    codes = np.frombuffer(data, np.uint8).reshape(spec.shape)
    scale_entry, scale_data = tensors[name.removesuffix("weight") + "scale"]
    assert scale_entry["dtype"] == "F8_E8M0"
    scale = 2.0 ** (np.frombuffer(scale_data, np.uint8).astype(np.float64) - 127).reshape(scale_entry["shape"])
    if spec.storage == "fp4":
        assert entry["dtype"] == "I8"
        nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
        values = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
    else:
        assert entry["dtype"] == "F8_E4M3"
        values = e4m3_table()[codes]
    if spec.storage == "fp8":
        scale = scale.repeat(32, axis=0)[: len(values)]
    return values * scale.repeat(32, axis=1)


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "draft+vision"])
def written(request, tmp_path_factory):
    config = tiny_config(request.param, vision=TINY_VISION if request.param else None)
    weights = random_weights(config, seed=3)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, config, weights, max_shard_bytes=300_000)
    return config, weights, folder


def test_files_hold_exactly_the_expected_tensors(written):
    config, _, folder = written
    tensors = read_all(folder)
    expected = expected_tensors(config)
    assert tensors.keys() == expected.keys()
    for name, spec in expected.items():
        assert tuple(tensors[name][0]["shape"]) == spec.shape, name


def test_load_equals_an_independent_decoding_of_the_bytes(written):
    config, weights, folder = written
    tensors, loaded = read_all(folder), load_weights(folder, config)
    assert loaded.keys() == parameter_shapes(config).keys()
    for name, spec in expected_tensors(config).items():
        if spec.storage == "e8m0":
            continue
        got = loaded[spec.parameter] if spec.expert is None else loaded[spec.parameter][spec.expert]
        assert got.dtype == torch.float32
        np.testing.assert_array_equal(got.double().numpy(), decode(name, spec, tensors), err_msg=name)


def test_quantisation_error_is_within_half_a_step(written):
    """BF16: 2^-8 of the value; E4M3: 2^-4 of it (or half the least step of its block); E2M1: half the step between 4
    and 6, with a scale up to twice amax / 6."""
    config, weights, folder = written
    loaded = load_weights(folder, config)
    for name, spec in parameter_specs(config).items():
        weight, error = weights[name], (loaded[name] - weights[name]).abs()
        if spec.storage == "f32":
            assert torch.equal(loaded[name], weight)
        elif spec.storage == "bf16":
            assert (error <= weight.abs() * 2**-8).all(), name
        elif spec.storage == "fp4":
            amax = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            assert (error.unflatten(-1, (-1, 32)) <= amax / 3).all(), name
        else:
            assert (error <= torch.maximum(weight.abs() * 2**-4, weight.abs().max() * 2**-16)).all(), name


def test_same_weights_give_the_same_bytes_and_values_survive_another_round(written, tmp_path):
    config, weights, folder = written
    write_checkpoint(tmp_path / "again", config, weights, max_shard_bytes=300_000)
    first, again = sorted(folder.iterdir()), sorted((tmp_path / "again").iterdir())
    assert [p.name for p in first] == [p.name for p in again]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, again, strict=True))

    loaded = load_weights(folder, config)
    write_checkpoint(tmp_path / "second", config, loaded, max_shard_bytes=300_000)
    reloaded = load_weights(tmp_path / "second", config)
    assert all(torch.equal(loaded[name], reloaded[name]) for name in loaded)
    write_checkpoint(tmp_path / "third", config, reloaded, max_shard_bytes=300_000)
    for path in (tmp_path / "second").iterdir():
        assert path.read_bytes() == (tmp_path / "third" / path.name).read_bytes()


@pytest.mark.parametrize("limit", [140_000, 300_000, 1_000_000, 1 << 30])
def test_shards_stay_below_the_limit_and_are_filled(tmp_path, limit):
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_weights(config, 1), limit)
    sizes = [p.stat().st_size for p in sorted(tmp_path.glob("*.safetensors"))]
    assert max(sizes) <= limit
    names = [p.name for p in sorted(tmp_path.glob("*.safetensors"))]
    assert names == [f"model-{n:05d}-of-{len(sizes):05d}.safetensors" for n in range(1, len(sizes) + 1)]
    # No tensor is larger than 135 kB, so a shard closes only when less than that was left.
    assert all(size > limit - 140_000 for size in sizes[:-1])


def test_a_second_write_replaces_the_first(tmp_path):
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_weights(config, 1), 200_000)
    weights = random_weights(config, 2)
    write_checkpoint(tmp_path, config, weights, 1 << 30)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(load_weights(tmp_path, config)["layers.0.attn.attn_sink"], weights["layers.0.attn.attn_sink"])


def test_config_json_and_tokenizer_are_written(tmp_path):
    config = tiny_config(2)
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    write_checkpoint(
        tmp_path / "out", config, random_weights(config, 1), 1 << 30, tokenizer_path=source / "tokenizer.json"
    )
    assert ModelConfig.from_file(tmp_path / "out") == config
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match=r"tokenizer_path: no tokenizer\.json"):
        write_checkpoint(
            tmp_path / "o2", config, random_weights(config, 1), 1 << 30, tokenizer_path=tmp_path / "absent"
        )


def test_synthetic_stream_equals_the_random_weights(tmp_path):
    config = tiny_config(2, vision=TINY_VISION)
    write_synthetic(tmp_path / "stream", config, seed=5, max_shard_bytes=400_000)
    write_checkpoint(tmp_path / "whole", config, random_weights(config, seed=5), 400_000)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "stream" / path.name).read_bytes(), path.name


def test_random_weights_make_every_mechanism_bite():
    config = tiny_config(2)
    weights = random_weights(config, seed=0)
    assert {n: tuple(t.shape) for n, t in weights.items()} == parameter_shapes(config)
    assert all(torch.equal(weights[n], t) for n, t in random_weights(config, seed=0).items())
    for name, tensor in weights.items():
        assert tensor.unique().numel() > 1, name
        assert torch.isfinite(tensor).all() and 0.01 < tensor.float().square().mean().sqrt() < 2, name
        if name.endswith("norm.weight"):
            assert (tensor - 1).abs().max() > 0.2, name
    gate = "layers.4.ffn.gate."
    assert not torch.equal(weights[gate + "bias"], weights[gate + "bias_vl"])
    assert not torch.equal(weights["layers.4.ffn.experts.w1.weight"][0], weights["layers.4.ffn.experts.w1.weight"][1])
    narrow = random_weights(config, seed=0, dtype=torch.bfloat16)
    assert narrow["layers.4.hc_attn_fn"].dtype == torch.float32
    assert narrow["layers.4.attn.wq_a.weight"].dtype == torch.bfloat16


def test_wrong_weights_are_named(tmp_path):
    config = tiny_config()
    weights = random_weights(config, 1)
    with pytest.raises(ValueError, match=r"'norm\.weight' is missing"):
        write_checkpoint(tmp_path, config, {n: t for n, t in weights.items() if n != "norm.weight"}, 1 << 30)
    with pytest.raises(ValueError, match=r"'stray' is not a tensor"):
        write_checkpoint(tmp_path, config, {**weights, "stray": torch.zeros(1)}, 1 << 30)
    with pytest.raises(ValueError, match=r"'norm\.weight' has shape \[3\], expected \[128\]"):
        write_checkpoint(tmp_path, config, {**weights, "norm.weight": torch.zeros(3)}, 1 << 30)
    with pytest.raises(ValueError, match=r"max_shard_bytes is 100000, allowed: at least \d+ for 'embed\.weight'"):
        write_checkpoint(tmp_path, config, weights, 100_000)
