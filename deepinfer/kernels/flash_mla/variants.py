"""What the attention kernel of attention.cu is specialised to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from deepinfer.kernels.deep_jit import Build
from deepinfer.kernels.reference.cache_rows import RowFormat

SOURCE = Path(__file__).parent / "attention.cu"
ROW_FORMATS = {None: 0, "bf16": 1, RowFormat.FP8: 2, RowFormat.NVFP4: 3}


@dataclass(frozen=True)
class Variant:
    """What the kernel is specialised to. Formats are keys of ROW_FORMATS; a page of 0 rows means one page."""

    heads: int
    window_format: RowFormat | str
    window_page: int
    latent_format: RowFormat | str | None
    latent_page: int
    split: int = 1
    q_norm: bool = False
    rope: bool = False
    fp8: bool = False

    def build(self) -> Build:
        """What to compile."""
        return Build(
            "sparse_attention",
            SOURCE,
            {
                "HEADS": self.heads,
                "WINDOW_FORMAT": ROW_FORMATS[self.window_format],
                "WINDOW_PAGE": self.window_page,
                "LATENT_FORMAT": ROW_FORMATS[self.latent_format],
                "LATENT_PAGE": self.latent_page,
                "SPLIT": self.split,
                "Q_NORM": int(self.q_norm),
                "ROPE": int(self.rope),
                "OUT_FP8": int(self.fp8),
            },
        )


def builds() -> list[Build]:
    """What V4.1-Flash's engine launches: prefill and decode, packed and BF16 caches, both compression ratios."""
    ring, sources = 134, ((None, 0), ("latent", 64), ("latent", 128))  # rows a page at block size 128
    variants = []
    for packed, (kind, page) in product((True, False), sources):
        latent = None if kind is None else RowFormat.NVFP4 if packed else "bf16"
        variants.append(Variant(64, "bf16", 0, latent, page, rope=True))
        window = RowFormat.FP8 if packed else "bf16"
        variants += [Variant(64, window, ring, latent, page, split, rope=True) for split in (1, 2, 4)]
        if kind is None:  # the draft head's, without rotation
            variants += [Variant(64, window, ring, None, 0, split) for split in (1, 2, 4)]
    fused = [Variant(64, RowFormat.FP8, ring, RowFormat.NVFP4, page, 1, rope=True, fp8=True) for page in (64, 128)]
    return [variant.build() for variant in dict.fromkeys([*variants, *fused])]
