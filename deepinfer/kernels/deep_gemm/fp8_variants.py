"""What the dense FP8 kernel of fp8_gemm.cu is specialised to, and which tile suits a shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deepinfer.kernels.deep_jit import Build

SOURCE = Path(__file__).parent / "fp8_gemm.cu"
SHARED_BYTES = 232_448  # of a block on Hopper
STAGING_BYTES = 25 * 1024  # of the result, on its way to the copy engine, and its alignment
THREADS = 384


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a block's tile; `share` is the operand that two blocks of a cluster share ("" for none).

    `k_parts` blocks of a cluster divide the summed columns instead.
    """

    m: int
    n: int
    share: str = "a"
    band: int = 8
    k_parts: int = 1

    @property
    def cluster(self) -> int:
        return 2 if self.share else 1

    @property
    def stages(self) -> int:
        """Buffers of 128 columns that fit into shared memory, at most 8."""
        staging = STAGING_BYTES if self.k_parts == 1 else 1024
        return min(8, (SHARED_BYTES - staging) // (self.m * 128 + self.n * 128 + self.m * 4 + 16))

    @property
    def shared_bytes(self) -> int:
        staging = STAGING_BYTES if self.k_parts == 1 else 1024
        return self.stages * (self.m * 128 + self.n * 128 + self.m * 4 + 16) + staging

    def build(self, b_row_scales: bool) -> Build:
        """What to compile."""
        defines: dict[str, int | str] = {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "SHARE_A": int(self.share == "a"),
            "K_PARTS": self.k_parts,
            "BAND": self.band,
            "B_ROW_SCALES": int(b_row_scales),
            "FEEDER_REGISTERS": 40,
            "MATH_REGISTERS": 232,
        }
        return Build("fp8_gemm", SOURCE, defines)


TILES = (
    Tile(256, 128, "a"),
    Tile(128, 128, "a"),
    Tile(128, 128, "", k_parts=2),
    Tile(128, 64, ""),
    Tile(64, 128, "", k_parts=4),
    Tile(64, 128, "", k_parts=2),
    Tile(64, 64, "", k_parts=4),
    Tile(64, 64, "", k_parts=2),
    Tile(64, 64, ""),
)

# In clock cycles of an H200: what a block copies to shared memory, the least for 128 columns, the rest of a tile.
BYTES_A_CYCLE = 45
STEP_CYCLES, TILE_CYCLES, EXCHANGE_CYCLES = 500, 3000, 9000


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, processors: int) -> Tile:
    """The tile with the least estimated time: rounds of tiles over the card's processors, times the cost of one."""

    def cost(tile: Tile) -> float:
        columns, rows = (tile.n * 2, tile.m) if tile.share == "a" else (tile.n, tile.m * tile.cluster)
        clusters = -(-m // rows) * -(-n // columns)
        rounds = -(-clusters // (processors // (tile.cluster * tile.k_parts)))
        arithmetic, copies = tile.m * tile.n / 27, (tile.m + tile.n) * 128 / BYTES_A_CYCLE
        steps = -(-k // (128 * tile.k_parts))
        rest = TILE_CYCLES + (EXCHANGE_CYCLES if tile.k_parts > 1 else 0)
        return rounds * (steps * max(arithmetic, copies, STEP_CYCLES) + rest)

    return min(TILES, key=cost)


def builds() -> list[Build]:
    """Every tile, for both kinds of scales of B."""
    return [tile.build(rows) for tile in TILES for rows in (False, True)]
