"""The Triton matrix products: against torch in float64, and their promise that a row's bits don't depend on N."""

import pytest
import torch

from specdec.kernels import linear as reference
from specdec.kernels.activation import act_mul
from specdec.kernels.gpu import fast, tma
from specdec.kernels.gpu.launch import on_hopper as can_run
from specdec.kernels.gpu.linear import gated_linear, linear
from specdec.kernels.gpu.tiles import (
    _MANY_ROWS,
    _MANY_ROWS_BY_TMA,
    _TMA_TILES,
    HALF_BUSY,
    TMA_PROGRAMS,
    Tile,
    tile_of,
)
from specdec.kernels.gpu.tma import _in_halves, takes_tma
from specdec.kernels.slabs import SLAB, in_slabs, to_slabs
from tests import sanitize
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close
from tests.test_formats import on_hopper

pytestmark = pytest.mark.gpu if ON_GPU else []
SHAPES = [(1, 48, 64), (7, 100, 72), (16, 33, 128), (33, 64, 200), (150, 40, 64)]
"""Rows, outputs, k."""


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    n, out, k = shape
    x, w, bias = random(n, k, dtype=dtype), random(out, k, dtype=dtype) / k**0.5, random(out, dtype=dtype)
    assert_close(linear(x, w), x.double() @ w.double().T)
    assert_close(linear(x, w, bias), x.double() @ w.double().T + bias.double())


@pytest.mark.skipif(ON_GPU and not can_run(torch.device(DEVICE)), reason="made for Hopper GPUs")
@pytest.mark.parametrize("tile", [Tile(16, 64, 64, 4, 3, tma=True), Tile(64, 32, 64, 4, 3, tma=True)], ids=str)
@pytest.mark.parametrize("shape", [(7, 100, 72), (16, 33, 128), (33, 64, 200), (70, 130, 64)], ids=str)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_products_by_tma(dtype: torch.dtype, shape: tuple[int, int, int], tile: Tile) -> None:
    torch.manual_seed(4)
    n, out, k = shape
    wide, w, bias = (
        random(n, 2 * k, dtype=dtype),
        random(2 * out, k, dtype=dtype) / k**0.5,
        random(2 * out, dtype=dtype),
    )
    x = wide[:, k:]  # strided rows
    for b in (None, bias):
        y = linear(x, w, b, tile=tile)
        assert y.is_contiguous()
        assert_close(y, x.double() @ w.double().T + (0 if b is None else b.double()))
        assert_close(gated_linear(x, w, b, "silu", tile=tile), act_mul(linear(x, w, b), "silu"))


@pytest.mark.skipif(ON_GPU and not can_run(torch.device(DEVICE)), reason="made for Hopper GPUs")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_the_last_tile_by_tma_may_have_fewer_rows(rows: int) -> None:
    """Each row is what it is beside others; the interpreter's products are a BLAS library's, and nearly the same."""
    torch.manual_seed(5)
    out, k, half = 72, 128, rows // 2
    x, w = random(2 * rows + 1, k, dtype=torch.float16), random(2 * out, k, dtype=torch.float16) / k**0.5
    want, gated = linear(x, w), gated_linear(x, w, None, "silu")
    for n in sorted({1, half - 1, half, half + 1, rows - 1, rows, rows + 1, rows + half + 3, 2 * rows + 1}):
        tile = Tile(rows, 64, 64, 8 if rows == 128 else 4, 3, tma=True)
        for found, beside in (
            (linear(x[:n], w, tile=tile), want[:n]),
            (gated_linear(x[:n], w, None, "silu", tile=tile), gated[:n]),
        ):
            assert torch.equal(found, beside) if ON_GPU else torch.allclose(found, beside, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_boxes_have_no_rows_outside_x(rows: int) -> None:
    """TMA takes longer to fill those than to load others; of up to half a tile it makes no difference."""
    half = rows // 2
    for n in range(half + 1, 3 * rows):
        x = torch.arange(n)[:, None] * torch.ones(16, dtype=torch.float16)
        found = _in_halves(x, rows, 16)
        assert found.block_shape == [2, half, 16] and found.shape[0] == 2
        halves = x.as_strided(found.shape, found.strides)[:, :, 0]
        firsts = range(0, n, rows) if n >= rows else [0]
        boxes = [halves[:, first : first + half] for first in (min(first, max(n - rows, 0)) for first in firsts)]
        assert all(box.shape == (2, half) for box in boxes)
        assert set(torch.cat(boxes).flatten().tolist()) == set(range(n))


@pytest.mark.skipif(ON_GPU and not can_run(torch.device(DEVICE)), reason="made for Hopper GPUs")
@pytest.mark.parametrize(
    "tile", [Tile(16, 32, SLAB, 4, 3), Tile(16, 64, 64, 4, 3, True), Tile(64, 32, SLAB, 4, 3, True)], ids=str
)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
def test_products_of_slabs_have_the_same_bits(dtype: torch.dtype, tile: Tile) -> None:
    torch.manual_seed(6)
    out, k = 72, 3 * SLAB
    w, bias = random(2 * out, k, dtype=dtype) / k**0.5, random(2 * out, dtype=dtype)
    slabs = to_slabs(w)
    for n in (0, 1, 7, 70):
        x = random(n, k, dtype=dtype)
        for b in (None, bias):
            assert torch.equal(linear(x, slabs, b, tile=tile), linear(x, w, b, tile=tile))
            pair = [gated_linear(x, weight, b, "silu", tile=tile) for weight in (slabs, w)]
            assert torch.equal(*pair)
        assert torch.equal(fast.linear(x, slabs), linear(x, w))
        assert torch.equal(fast.gated_linear(x, slabs, None, "silu"), gated_linear(x, w, None, "silu"))
        assert torch.equal(reference.linear(x, slabs, bias), reference.linear(x, w, bias))


@pytest.mark.parametrize("n", [0, 1, 2, reference.MANY_ROWS - 1, reference.MANY_ROWS])
def test_the_reference_in_both_orders(n: int) -> None:
    torch.manual_seed(2)
    x, w, bias = torch.randn(n, 24), torch.randn(10, 24), torch.randn(10)
    for b in (None, bias):
        y = reference.linear(x, w, b)
        assert y.is_contiguous()
        torch.testing.assert_close(y, (x.double() @ w.double().T + (0 if b is None else b.double())).float())


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_products(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(1)
    n, out, k = 5, 50, 72
    x, w, bias = random(n, k, dtype=dtype), random(2 * out, k, dtype=dtype) / k**0.5, random(2 * out, dtype=dtype)
    for b in (None, bias):
        wide = x.double() @ w.double().T + (0 if b is None else b.double())
        assert_close(gated_linear(x, w, b, activation), act_mul(wide, activation))


@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_that_may_depend_on_the_number_of_rows(dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(3)
    out, k = 50, 72
    x, w, bias = random(n, k, dtype=dtype), random(2 * out, k, dtype=dtype) / k**0.5, random(2 * out, dtype=dtype)
    for b in (None, bias):
        wide = x.double() @ w.double().T + (0 if b is None else b.double())
        assert_close(fast.linear(x, w, b), wide)
        assert_close(fast.gated_linear(x, w, b, "silu"), act_mul(wide, "silu"))


def test_one_row_of_a_small_models_head_takes_the_deterministic_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "MANY_OUT", 64)
    x, w = random(1, 64, dtype=torch.float16), random(96, 64, dtype=torch.float16)
    assert torch.equal(fast.linear(x, w), linear(x, w))
    assert torch.equal(fast.gated_linear(x, w, None, "gelu"), gated_linear(x, w, None, "gelu"))


def test_rows_may_be_strided() -> None:
    x, w = random(4, 3, 64, dtype=torch.float16), random(32, 64, dtype=torch.float16)
    assert torch.equal(linear(x[:, 1], w), linear(x[:, 1].contiguous(), w))
    for by_tma in (False, True):
        assert linear(x[:0, 1], w, tile=Tile(16, 64, 64, 4, 3, by_tma)).shape == (0, 32)


@pytest.mark.parametrize("tma", [True, False])
def test_every_row_count_has_a_tile(tma: bool) -> None:
    for n in (1, 16, 17, 32, 33, 64, 65, 5000):
        tile = tile_of(n, 4096, 4096, tma=tma)
        assert tile.rows >= min(n, 32 if tma else 64) and tile.k % 16 == 0 and tile.tma == (tma and n != 65)


def test_tma_is_taken_where_it_keeps_a_gpu_busy() -> None:
    for num_weights, out, k in ((1, 4096, 4096), (1, 6144, 4096), (2, 14336, 4096), (1, 128256, 4096)):
        for n in (1, 16, 32, 64):
            tile = tile_of(n, out, k, num_weights, tma=True)
            assert tile.tma and out >= TMA_PROGRAMS * tile.out and tile.rows == max(n, 16)
    assert [tile_of(4, out, 4096, tma=True).out for out in (6144, 5120)] == [128, 64], (
        "a few rows of a wide one take fewer"
    )
    assert [tile_of(n, 6144, 4096, tma=True).out for n in (1, 2, 4, 5)] == [64, 128, 128, 64]
    assert [tile_of(n, 4096, 14336, tma=True).rows for n in (2, 16, 17, 32, 64)] == [16, 16, 32, 32, 32]
    for n, out, k in ((1, 2048, 2048), (64, 1024, 4096), (16, 576, 576), (65, 4096, 4096), (1, 4096, 14336)):
        assert not tile_of(n, out, k, tma=True).tma


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("num_weights", [1, 2])
def test_many_rows_take_large_tiles_where_these_keep_a_gpu_busy(num_weights: int, tma: bool) -> None:
    tiles = [tile_of(n, 4096, 4096, num_weights, tma=tma) for n in (65, 128, 512, 2048, 8192)]
    assert [tile.tma for tile in tiles] == [False, False, tma, tma, tma]
    areas = [tile.rows * tile.out for tile in tiles]
    assert areas == sorted(areas) and areas[0] < areas[-1]
    for n, tile in zip((65, 128, 512, 2048, 8192), tiles, strict=True):
        assert tile == tiles[0] or -(-n // tile.rows) * -(-4096 // tile.out) >= HALF_BUSY


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_weights", [1, 2])
def test_every_tile_fits_the_shared_memory(num_weights: int, itemsize: int) -> None:
    for out, k in [(960, 576), (49152, 576), (4096, 1536), (4096, 4096), (14336, 4096), (128256, 4096)]:
        for n in (1, 16, 64, 128, 512, 4096):
            t = tile_of(n, out, k, num_weights, itemsize)
            loaded = tile_of(n, out, k, num_weights, itemsize, tma=itemsize == 2)
            assert loaded.fitting(227 << 10, num_weights, itemsize) == loaded, "and has room for barriers"
            assert loaded.num_bytes(num_weights, itemsize) <= 226 << 10
            assert t.num_bytes(num_weights, itemsize) <= 227 << 10, f"{n} rows, [{out}, {k}]: {t}"
            for room in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
                smaller = t.fitting(room, num_weights, itemsize)
                assert smaller.num_bytes(num_weights, itemsize) <= room
                assert (smaller.rows, smaller.out) == (t.rows, t.out)
            assert smaller == t, "of the last of these are the tiles made"


def test_products_fit_the_shared_memory_of_other_gpus() -> None:
    """As they are compiled, for Ampere, Ada and both kinds of Blackwell."""
    needed = on_hopper("""
from tests.hopper import COMPILED, multiply, pretend
for capability, room in (80, 163 << 10), (89, 99 << 10), (100, 227 << 10), (120, 99 << 10):
    pretend(capability, room)
    for rows in 16, 64:
        multiply(4096, 4096, rows=rows)
        multiply(14336, 4096, rows=rows, gated=True)
    assert all(made["capability"] == capability for _, made in COMPILED)
    print(room, *(made["shared"] for _, made in COMPILED), sep=", ")
    COMPILED.clear()
""")
    assert [len(sizes) for sizes in needed] == [5] * 4
    for room, *sizes in needed:
        assert room // 2 < max(sizes) <= room


def test_tma_brings_all_operands_of_a_large_models_products() -> None:
    """As they are compiled: no thread copies, and the matrix instructions are those of warp groups.

    But for tiles of 32 outputs, of which a warp group would take 64.
    """
    made = on_hopper("""
import re
from tests.hopper import COMPILED, multiply
SHAPES = (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (128256, 4096, False), (4096, 16384, False)
for rows in 1, 4, 16, 32, 64:
    for out, k, gated in SHAPES[:4] if rows == 1 else SHAPES:
        for slabs in False, True:
            COMPILED.clear()
            multiply(out, k, rows=rows, gated=gated, by_tma=True, slabs=slabs)
            [(name, found)] = COMPILED
            instructions = re.findall(r"(cp.async(?!.bulk.prefetch)[.a-z]+|mma.sync|wgmma.mma_async)", found["ptx"])
            print((name, gated, found["shared"], sorted(set(instructions))))
""")
    assert len(made) == 48
    for name, gated, shared, instructions in made:
        least = 64 if gated else 128  # KiB; gated products are faster with fewer loads in flight
        assert name == "_tma_kernel" and least << 10 < shared <= 227 << 10
        copies, *products = (i.split(".global")[0] for i in instructions)
        assert copies == "cp.async.bulk.tensor." and products in (["wgmma.mma_async"], ["mma.sync"])
    assert sum("mma.sync" in instructions for *_, instructions in made) == 2


def test_a_products_first_weights_are_asked_for_before_it_waits() -> None:
    """Of slabs, by one thread, as many bytes as a program's tile has of the first one; of two weights 8 KiB each."""
    made = on_hopper("""
import re
from tests.hopper import COMPILED, multiply
from specdec.kernels.gpu.tiles import tile_of
for rows, slabs in (1, True), (64, True), (4096, True), (64, False):
    for out, gated in (4096, False), (14336, True):
        COMPILED.clear()
        multiply(out, 4096, rows=rows, gated=gated, by_tma=True, slabs=slabs)
        [(_, found)] = COMPILED
        ptx, tile = found["ptx"], tile_of(rows, out, 4096, 1 + gated, 2, True)
        before = ptx[: ptx.index("griddepcontrol.wait")]
        asked = re.findall(r"@first cp.async.bulk.prefetch.L2.global .*?, (%r[0-9]+);", before)
        sizes = [int(re.search(rf"mov.b32[^0-9]+{size}, ([0-9]+);", before)[1]) for size in asked]
        print((rows, slabs, gated, tile.out, sizes, ptx.count("prefetch") - len(asked)))
""")
    assert len(made) == 8
    for rows, slabs, gated, out, sizes, others in made:
        of_first = [8192] * 2 if gated else [out * SLAB * 2]
        assert sizes == (of_first if slabs and rows <= 64 else []) and not others


def test_products_for_the_sanitizer_are_of_slabs_where_matrices_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU; nothing is launched. A small model's matrix is none of slabs."""
    found: list[tuple[int, bool]] = []
    monkeypatch.setattr(sanitize, "takes_tma", lambda x, weight: True)
    for name in ("linear", "gated_linear"):
        monkeypatch.setattr(sanitize, name, lambda x, w, *args, **how: found.append((x.shape[1], in_slabs(w))))
    sanitize.products()
    assert set(found) == {(4096, False), (4096, True), (576, False)}


def test_tma_is_taken_where_rows_stand_at_addresses_that_it_can_load_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tma, "on_hopper", lambda device: True)
    x, w = torch.zeros(4, 128, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    assert takes_tma(x[:, :64], w) and takes_tma(x[:, 8:72], w) and takes_tma(x[:1, 64:], w)
    assert not takes_tma(x[:, 4:68], w), "a row begins between two that it can load from"
    assert not takes_tma(torch.zeros(4, 60).half(), torch.zeros(32, 60).half()), "the second row does"
    assert not takes_tma(x[:1, :64].expand(4, 64), w), "all rows are the same one"
    assert not takes_tma(x[:, :64].float(), w.float())
    monkeypatch.setattr(tma, "on_hopper", lambda device: False)
    assert not takes_tma(x[:, :64], w)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's products are a BLAS library's, whose bits depend on the size")
@pytest.mark.parametrize(
    "shape", [(960, 576), (4096, 4096), (1000, 1536), (4096, 14336), (16384, 2048), (32768, 2048)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    out, k = shape
    x, w = random(2048, k, dtype=dtype), random(out, k, dtype=dtype) / k**0.5
    whole, gated = linear(x, w), gated_linear(x, w, None, "silu")
    for n in (1, 7, 16, 32, 64, 96, 160, 256, 512):
        assert torch.equal(linear(x[:n], w), whole[:n]), f"{n} rows"
        assert torch.equal(gated_linear(x[:n], w, None, "silu"), gated[:n]), f"{n} gated rows"
    for tile in (
        Tile(16, 16, 64, 4, 4),
        Tile(16, 128, 64, 8, 3),
        Tile(64, 32, 128, 4, 3),
        Tile(128, 128, 64, 8, 2),
        *_MANY_ROWS[2],
    ):
        assert torch.equal(linear(x[:256], w, tile=tile), whole[:256]), f"{tile}"


@pytest.mark.skipif(not can_run(torch.device(DEVICE)), reason="made for Hopper GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_do_not_depend_on_who_loads_the_operands(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, w = (
        random(300, 7 * SLAB, dtype=dtype),
        random(2000, 7 * SLAB, dtype=dtype) / 42,
    )  # tiles end within rows, outputs
    slabs = to_slabs(w)
    whole = linear(x, w, tile=Tile(64, 64, 64, 4, 3)), gated_linear(x, w, None, "silu", tile=Tile(64, 64, 64, 4, 3))
    tiles = [(t, 2 if kind == "gated" else 1) for kind, found in _TMA_TILES.items() for t in found.values()]
    tiles += [(t, num_weights) for num_weights, found in _MANY_ROWS_BY_TMA.items() for t in found]
    for t, num_weights in tiles:
        for weight in (w, slabs):
            y = linear(x, weight, tile=t) if num_weights == 1 else gated_linear(x, weight, None, "silu", tile=t)
            assert torch.equal(y, whole[num_weights - 1]), f"{t}"
