"""Keys that are spread over their channels before they are quantized, and the queries that meet them."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import Tensor

from specdec.kernels import rope, spread, write
from specdec.kernels.formats import FORMATS, SCALE_DTYPE, QuantizedPages
from specdec.kernels.gpu import rope as gpu_rope
from specdec.kernels.gpu import spread as gpu_spread
from specdec.models.cachecheck import check_cache
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel
from tests.conftest import tiny_llama
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close
from tests.own_forward import GROUPED, tiny

pytestmark = pytest.mark.gpu if ON_GPU else []
DIMS = [64, 80, 96, 128, 256]
HEADS, KV_HEADS = 3, 2


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def matrix(dim: int) -> Tensor:
    """[dim, dim] fp64: the sign of row i and column j is that of the bits that i and j share, in blocks."""
    size = {64: 64, 80: 16, 96: 32, 128: 128, 256: 256, 7: 1}[dim]
    i = torch.arange(size)
    shared = sum((i[:, None] & i) >> bit & 1 for bit in range(8))
    return torch.block_diag(*[(1.0 - 2.0 * (shared % 2)).double() / size**0.5] * (dim // size)).to(DEVICE)


def empty_pages(name: str, dim: int, slots: int) -> list[QuantizedPages]:
    how = FORMATS[name].of_head_dim(dim)
    return [
        QuantizedPages(
            torch.zeros(1, slots, KV_HEADS, how.code_width(dim), dtype=torch.uint8, device=DEVICE),
            torch.zeros(1, slots, KV_HEADS, how.num_scales(dim), dtype=SCALE_DTYPE, device=DEVICE),
            how,
        )
        for _ in "kv"
    ]


def same(a: list[QuantizedPages], b: list[QuantizedPages]) -> bool:
    return all(torch.equal(x.codes, y.codes) and torch.equal(x.scales, y.scales) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dim", [*DIMS, 7])
def test_it_is_a_product_with_hadamard_matrices_and_its_own_inverse(dim: int) -> None:
    x = randn(5, 2, dim).double()
    torch.testing.assert_close(spread.spread(x), x @ matrix(dim), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(spread.spread(spread.spread(x)), x, atol=1e-12, rtol=1e-12)
    half = spread.spread(x.half())
    assert half.dtype == torch.float16 and torch.equal(half, spread.spread(x.half().float()).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_triton_gives_the_bits_of_the_definition(dim: int, dtype: torch.dtype) -> None:
    x = randn(3, 5, dim + 3, dtype=dtype)[:, 1:, :dim]
    assert torch.equal(gpu_spread.spread(x), spread.spread(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_rope_write_spreads_queries_and_keys_and_no_values(dim: int, dtype: torch.dtype) -> None:
    """In fp32 it has the bits of three separate steps; below that it rounds less often."""
    name, slots = "int8" if dim == 80 else "int4", torch.tensor([4, -1, 0, 2], device=DEVICE)
    qkv = randn(4, HEADS + 2 * KV_HEADS, dim, dtype=dtype)
    cos, sin = randn(4, dim // 2, dtype=dtype, seed=1), randn(4, dim // 2, dtype=dtype, seed=2)
    native = [torch.zeros(1, 5, KV_HEADS, dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    turned = gpu_rope.rope_write(qkv, cos, sin, native[0], native[1], slots, HEADS)
    got, want = (empty_pages(name, dim, 5) for _ in range(2))
    q = gpu_rope.rope_write(qkv, cos, sin, got[0], got[1], slots, HEADS)
    kept = slots[slots >= 0]
    write.kv_write(spread.spread(native[0][0, kept]), native[1][0, kept], want[0], want[1], kept)
    assert_close(q, turned.double() @ matrix(dim))
    assert same(got[1:], want[1:])
    if dtype == torch.float32:
        assert torch.equal(q, spread.spread(turned)) and same(got, want)
    by_reference = empty_pages(name, dim, 5)
    rows = [x[slots >= 0] for x in (qkv, cos, sin)]
    reference = rope.rope_write(*rows, by_reference[0], by_reference[1], kept, HEADS)
    torch.testing.assert_close(reference, q[slots >= 0], atol=2e-2, rtol=1e-2)
    assert same(by_reference[1:], want[1:])


def test_bits_of_a_row_do_not_depend_on_the_number_of_rows() -> None:
    qkv, cos, sin = randn(9, HEADS + 2 * KV_HEADS, 64).half(), randn(9, 64).half(), randn(9, 64, seed=1).half()
    slots = torch.arange(9, device=DEVICE)
    for module in (rope, gpu_rope):
        pages, few = (empty_pages("int8", 64, 9) for _ in range(2))
        q = module.rope_write(qkv, cos, sin, pages[0], pages[1], slots, HEADS)
        for rows in (slice(0, 1), slice(1, 9)):
            args = (x[rows] for x in (qkv, cos, sin))
            assert torch.equal(module.rope_write(*args, few[0], few[1], slots[rows], HEADS), q[rows])
        assert same(few, pages)


@pytest.mark.parametrize("name", ["native", "int8", "int4", "fp8"])
def test_bits_do_not_depend_on_the_heads_of_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, cos, sin = randn(9, HEADS + 2 * KV_HEADS, 64).half(), randn(9, 64).half(), randn(9, 64, seed=1).half()
    slots, found = torch.arange(9, device=DEVICE), []
    for program in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 8)):
        monkeypatch.setattr(gpu_rope, "NATIVE", program)
        monkeypatch.setattr(gpu_rope, "QUANTIZED", (program, program))
        if name == "native":
            k, v = (torch.zeros(1, 9, KV_HEADS, 64, dtype=torch.half, device=DEVICE) for _ in "kv")
            q = gpu_rope.rope_write(qkv, cos, sin, k, v, slots, HEADS)
            found.append(torch.cat([x.flatten() for x in (q, k, v)]))
        else:
            pages = empty_pages(name, 64, 9)
            q = gpu_rope.rope_write(qkv, cos, sin, pages[0], pages[1], slots, HEADS)
            parts = [q, *(x for page in pages for x in (page.codes, page.scales))]
            found.append(torch.cat([x.flatten().view(torch.uint8) for x in parts]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_float_pages_take_keys_as_they_are() -> None:
    qkv, ones = randn(2, HEADS + 2 * KV_HEADS, 64), torch.ones(2, 64, device=DEVICE)
    slots = torch.tensor([0, 1], device=DEVICE)
    for name in ("fp8", "fp8_e4m3"):
        got, want = (empty_pages(name, 64, 2) for _ in range(2))
        q = gpu_rope.rope_write(qkv, ones, ones * 0, got[0], got[1], slots, HEADS)
        write.kv_write(qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:], want[0], want[1], slots)
        assert torch.equal(q, qkv[:, :HEADS]) and same(got, want)


@pytest.mark.parametrize("own_forward", [False, True])
def test_it_pays_where_a_key_channel_is_large(own_forward: bool) -> None:
    """Two channels that turn together are 30 times as large as they were, and queries as much smaller."""
    wide = GROUPED | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    model = tiny(hf.StableLmConfig(**wide)) if own_forward else tiny_llama(head_dim=64, initializer_range=0.2)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, factor in ((layer.self_attn.k_proj, 30), (layer.self_attn.q_proj, 1 / 30)):
                projection.weight.view(-1, 64, projection.in_features)[:, [0, 8 if own_forward else 32]] *= factor
    packed = HFModel(model.float()) if own_forward else Decoder(model.float())
    layout = packed.kv_layout.stored_as("int8")
    assert layout.format is not None
    spread_out = check_cache(packed, layout)
    as_they_are = check_cache(packed, replace(layout, format=replace(layout.format, spread=False)))
    assert 0 < spread_out.kl < as_they_are.kl / 3, (str(spread_out), str(as_they_are))


def test_on_a_hopper_gpu_no_warp_waits_for_another() -> None:
    """One launch, in which the sums stay within a warp."""
    code = """
import torch
from tests.hopper import COMPILED, pages_of
from specdec.kernels.gpu.rope import rope_write
zeros = torch.zeros(1, 128, dtype=torch.bfloat16)
rope_write(zeros.expand(1, 48, 128), zeros, zeros, *pages_of("int8", 8, 128), torch.zeros(1, dtype=torch.int64), 32)
print(*((name, made["ptx"].count("shfl.sync") > 0, made["ptx"].count("bar.sync")) for name, made in COMPILED))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "('_rope_write_kernel', True, 0)\n"
