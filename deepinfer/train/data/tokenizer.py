"""Train nano's tokenizer: byte-level BPE with the V4 pre-tokeniser and the V4.1 control tokens (recipe spec, 1)."""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.recipe.control_tokens import CONTROL_TOKENS

VOCAB_SIZE = 8192
FIRST_ROLES = ("bos", "eos", "pad")  # ids 0, 1, 2; the other control tokens end the vocabulary
PLACEHOLDERS = 8  # <｜place▁holder▁no▁0｜> is DSpark's noise token
# Not "special" in the public file either: a decoder that skips special tokens still shows them.
VISIBLE_ROLES = ("user", "assistant", "think_start", "think_end", "dsml", "latest_reminder")

DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """The splits of the V4 tokenizer: digits in runs of 1 to 3, CJK and kana runs, words and punctuation, bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (DIGITS, CJK, WORDS)]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_tokenizer(texts: Iterable[str]) -> dict[str, Any]:
    """A tokenizer.json definition of exactly VOCAB_SIZE tokens, trained on `texts`.

    Raises ValueError when the texts are too few to fill the vocabulary.
    """
    last_roles = [role for role in CONTROL_TOKENS if role not in FIRST_ROLES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - PLACEHOLDERS - len(last_roles),
        special_tokens=[CONTROL_TOKENS[role] for role in FIRST_ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([f"<｜place▁holder▁no▁{i}｜>" for i in range(PLACEHOLDERS)])
    for role in last_roles:
        token = AddedToken(CONTROL_TOKENS[role], normalized=False, special=role not in VISIBLE_ROLES)
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"texts: gave a vocabulary of {tokenizer.get_vocab_size()}, {VOCAB_SIZE} wanted")
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition
