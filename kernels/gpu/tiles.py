"""How matrix products are cut into tiles, and which tile is the fastest for how many rows.

An element's bits don't depend on it. Few rows are bound by the weight's bytes: what counts is how many of its loads are
in flight, as many as memory needs but no more, and how many bytes of the rows each program reads beside them.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from specdec.kernels.gpu.launch import SMALL_INPUTS


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: a program's rows, outputs and step over k; its warps and the loads in flight.

    `tma` says that the tensor memory accelerator loads the operands, instead of each thread its own part.
    """

    rows: int
    out: int
    k: int
    warps: int
    stages: int
    tma: bool = False

    def num_bytes(self, num_weights: int = 1, itemsize: int = 2) -> int:
        """Bytes of shared memory that its loads in flight take at most."""
        return (self.rows + self.out * num_weights) * self.k * self.stages * itemsize

    def fitting(self, room: int, num_weights: int = 1, itemsize: int = 2) -> "Tile":
        """The same with fewer loads in flight, and then smaller steps over k, as `room` bytes of shared memory need it.

        A sum's bits depend on neither.
        """
        tile = self
        while tile.num_bytes(num_weights, itemsize) > room and (tile.stages > 1 or tile.k > 16):
            fewer = tile.stages > 3 or tile.k <= 16
            tile = replace(tile, stages=tile.stages - 1) if fewer else replace(tile, k=tile.k // 2)
        return tile


_MANY_ROWS = {
    1: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 4), Tile(64, 64, 128, 4, 5)),
    2: (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4), Tile(64, 64, 64, 4, 4)),
}
"""Tiles of more than 64 rows by the number of weights, the one with the fewest bytes an operation first."""
_MANY_ROWS_BY_TMA = {
    1: (Tile(128, 256, 64, 8, 3, True), Tile(128, 128, 64, 8, 5, True), Tile(128, 64, 64, 4, 4, True)),
    2: (Tile(128, 128, 64, 8, 4, True),),
}
"""The same by TMA."""
_SOME_ROWS_BY_TMA = Tile(64, 128, 128, 4, 4, True)
"""By TMA, of somewhat more than 64 rows and one weight."""
ABOUT_BUSY = 144
"""Up to so many of these tiles they are taken, from `HALF_BUSY` on: about one a multiprocessor."""
MANY_PRODUCTS = 1 << 32
"""Products of two numbers from which on TMA is taken for more than 64 rows. Of fewer it gains little, and what it is to
load takes the host longer to say."""
HALF_BUSY = 66
"""Tiles from which on half of a GPU's multiprocessors have one; where they are fewer, smaller tiles are faster."""
_TMA_TILES = {
    "gated": {
        1: Tile(16, 128, 64, 4, 4, True),
        8: Tile(16, 128, 128, 4, 3, True),
        16: Tile(16, 128, 64, 4, 3, True),
        32: Tile(32, 128, 64, 4, 4, True),
        64: Tile(64, 64, 64, 4, 3, True),
    },
    "head": {
        16: Tile(16, 128, 128, 4, 5, True),
        32: Tile(32, 128, 128, 4, 5, True),
        64: Tile(64, 256, 64, 8, 4, True),
    },
    "wide": {
        16: Tile(16, 64, 256, 4, 4, True),
        32: Tile(32, 64, 128, 4, 6, True),
        64: Tile(64, 64, 128, 4, 5, True),
    },
    "few rows": {
        4: Tile(16, 128, 128, 4, 5, True),
    },
    "narrow": {
        16: Tile(16, 64, 256, 4, 5, True),
        32: Tile(32, 32, 256, 4, 5, True),
        63: Tile(32, 64, 256, 4, 4, True),
        64: Tile(64, 32, 256, 4, 4, True),
    },
    "deep": {
        16: Tile(16, 64, 256, 4, 5, True),
        32: Tile(32, 64, 128, 4, 8, True),
        64: Tile(32, 64, 256, 4, 4, True),
    },
}
"""Tiles by TMA of a large model's products, by the most rows. Of many inputs, 64 rows are two tiles that share weights:
a multiprocessor would have more to load of one with as many outputs, and all together of one with half of them."""
TMA_PROGRAMS = 64
"""Programs from which on these tiles are taken; of fewer, each would load more than a multiprocessor can."""
FEW_ROWS_OUT = 6144
"""Outputs of a wide matrix from which on a few rows take fewer programs than that, and leave room to rotation and to
attention, which has many of them then."""
LARGE_OUT = 32768
"""Outputs from which on a matrix is a head, or as good as one."""


def tile_of(num_rows: int, out: int, k: int, num_weights: int = 1, itemsize: int = 2, tma: bool = False) -> Tile:
    """Choose the tile for [num_rows, k] by `num_weights` matrices [out, k] of `itemsize` bytes an element.

    Up to 64 rows of a large model they were the fastest in captured steps on an H200 (`engine_gpu.py tiles` tries those
    beside them), others by themselves on an H100, and with TMA on an H200 (`kernels_gpu.py products --search`).

    Args:
        num_rows, out, k, num_weights, itemsize: the product.
        tma: whether the tensor memory accelerator can load the operands; it does where that is faster.
    """
    if tma and k >= SMALL_INPUTS:
        found = _tma_tile_of(num_rows, out, k, num_weights)
        if found is not None:
            return found
    tile = _tile_of_two_bytes(num_rows, out, k, num_weights)
    return tile if itemsize <= 2 else replace(tile, k=tile.k // 2)  # the loads in flight fill the shared memory


def _tma_tile_of(num_rows: int, out: int, k: int, num_weights: int) -> Tile | None:
    """The tile by TMA of a large model's product; None: the threads' own loads are as fast, or faster."""
    if num_rows > 64:
        if num_weights == 1 and HALF_BUSY <= _programs(num_rows, out, _SOME_ROWS_BY_TMA) <= ABOUT_BUSY:
            return _SOME_ROWS_BY_TMA
        tiles = _MANY_ROWS_BY_TMA[num_weights] if num_rows * out * k >= MANY_PRODUCTS else ()
        return next((t for t in tiles if _programs(num_rows, out, t) >= HALF_BUSY), None)
    if num_weights == 2:
        kind = "gated"
    elif out >= LARGE_OUT:
        kind = "head"
    elif out > 4096:
        kind = "few rows" if 2 <= num_rows <= 4 and out >= FEW_ROWS_OUT else "wide"
    elif k <= 8192:
        kind = "narrow"
    elif num_rows > 1:
        kind = "deep"
    else:
        return None
    tile = next(tile for most, tile in _TMA_TILES[kind].items() if num_rows <= most)
    return tile if kind == "few rows" or out >= TMA_PROGRAMS * tile.out else None


def _tile_of_two_bytes(num_rows: int, out: int, k: int, num_weights: int) -> Tile:
    if num_rows > 64:
        tiles = _MANY_ROWS[num_weights]
        return next((t for t in tiles if _programs(num_rows, out, t) >= HALF_BUSY), tiles[-1])
    rows = 16 if num_rows <= 16 else 64  # a tile of 32 rows was slower than one of 64 that is half empty
    if out * num_weights >= LARGE_OUT and k < 1024:  # a small model's head
        return Tile(rows, 128 if rows == 16 else 64, 64, 8 if rows == 16 else 4, 3 if rows == 16 else 4)
    if k < SMALL_INPUTS:
        return Tile(rows, 16 if rows == 64 or k > 1024 else 32, 256 if k > 1024 else 128, 4, 4)
    if rows == 64:
        if num_weights == 2 or out >= LARGE_OUT:
            return Tile(64, 64 if num_weights == 2 else 128, 128, 4, 4)
        return Tile(64, 64, 128, 4, 5) if out > 4096 else Tile(64, 32, 128, 4, 8)
    if num_weights == 2 or out >= LARGE_OUT:
        return Tile(16, 64, 256, 4, 3)
    if out > 4096:
        return Tile(16, 32, 256, 2, 4) if num_rows == 1 else Tile(16, 64, 256, 4, 4)
    return Tile(16, 32, 256, 2, 6)


def _programs(num_rows: int, out: int, tile: Tile) -> int:
    return -(-num_rows // tile.rows) * -(-out // tile.out)


@triton.jit
def tile_at(num_rows, num_out, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Which tile a program takes: eight row tiles share a column of weights while it is in the cache."""
    wide, high = tl.cdiv(num_out, OUT), tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    first = program // (8 * wide) * 8
    height = tl.minimum(high - first, 8)
    inside = program % (8 * wide)
    return first + inside % height, inside // height


def grid_of(num_rows: int, out: int, tile: Tile) -> tuple[int]:
    """Return the programs of a product, as `tile_at` counts them."""
    return (_programs(num_rows, out, tile),)


def row_stride(x: torch.Tensor) -> int:
    """Return the stride of a row; torch leaves that of a lone row arbitrary, and Triton compiles by what divides it."""
    return x.stride(0) if len(x) > 1 else x.shape[1]
