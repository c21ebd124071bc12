"""Quantized pages: what is stored, in how much room, and that no slot but a token's own is read or written."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.cache.pages import KVLayout, KVPages
from specdec.drafters.ngram import NGramDrafter
from specdec.engine.config import EngineConfig
from specdec.errors import ConfigError
from specdec.kernels import write
from specdec.kernels.formats import FORMATS, SCALE_DTYPE, KVFormat, QuantizedPages, load, quantize
from specdec.kernels.gpu.attention import tree_attention
from specdec.kernels.gpu.launch import lets_begin
from specdec.kernels.gpu.pages import load_values, pointers
from specdec.kernels.gpu.write import kv_write
from specdec.params import SamplingParams
from tests.conftest import tiny_llama
from tests.engines import make_engine, outputs, run
from tests.kernels import DEVICE, DTYPES, ON_GPU
from tests.test_attention import build

CASES = [
    ("fp8", 64, None), ("fp8", 80, None), ("fp8_e4m3", 10, None), ("fp8_e4m3", 128, None), ("int8", 8, 8),
    ("int8", 80, 16), ("int8", 128, None), ("int8", 256, 128), ("int4", 96, 32), ("int4", 128, None),
    ("int4", 256, 128),
]  # fmt: skip
"""Format, head_dim, group size."""
on_gpu = pytest.mark.gpu if ON_GPU else pytest.mark.skip(reason="needs a GPU")


def poisoned(how: KVFormat, slots: int, heads: int, dim: int) -> QuantizedPages:
    """Pages of one block whose codes are all bits and whose scales are NaN."""
    codes = torch.full((1, slots, heads, how.code_width(dim)), 0xFF, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((1, slots, heads, how.num_scales(dim)), torch.nan, dtype=SCALE_DTYPE, device=DEVICE)
    return QuantizedPages(codes, scales, how)


def values(rows: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, heads, D] of every size: an outlier, zeros, tiny, huge and infinite numbers, an offset, a constant."""
    x = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3] *= 300
    x[1], x[2], x[3, 0] = 0, x[2] * 1e-5, x[3, 0] * 9000
    x[4] += 40
    x[5] = 2.5
    x[3, 1, :2] = torch.tensor([torch.inf, -torch.inf])
    x[0, 1, 5] = -0.0
    return x.to(DEVICE, dtype)


def test_memory_of_a_token_against_bf16() -> None:
    bf16 = KVLayout(2, 4, 128, torch.bfloat16)
    sizes = {name: bf16.stored_as(name).bytes_per_head for name in FORMATS}
    assert sizes == {"fp8": 130, "fp8_e4m3": 130, "int8": 132, "int4": 72} and bf16.bytes_per_head == 256
    assert all(sizes[name] <= (0.29 if name == "int4" else 0.52) * 256 for name in FORMATS)
    for name in ("auto", *FORMATS):
        layout = bf16.stored_as(name)
        pages = KVPages(layout, 3, 16, torch.device("cpu"))
        assert sum(part.nbytes for part in pages._storage) == 3 * 16 * layout.bytes_per_token


@pytest.mark.parametrize(("name", "dim", "group"), CASES)
def test_values_are_off_by_at_most_half_a_step(name: str, dim: int, group: int | None) -> None:
    how = FORMATS[name].of_head_dim(dim, group)
    x = values(6, 2, dim).cpu()
    pages = QuantizedPages(*(part[None] for part in quantize(x, how)), how)
    got = load(pages, slice(None), torch.float64)
    assert float(x.max()) > how.max_value, "some stop there"
    grouped = x.double().clamp(-how.max_value, how.max_value).unflatten(-1, (-1, how.group))
    span = (grouped.amax(-1) - grouped.amin(-1) if how.zero_point else grouped.abs().amax(-1))[..., None]
    largest = grouped.abs().amax(-1, keepdim=True)
    # Half a step of the code, and what the rounding of scale and zero point adds: a scale has seven bits at least, and
    # is a multiple of 2^-24 as any number of fp16.
    step = span / how.largest / 2
    if how.fraction:  # of a number's own binade, or of the lowest one
        step = grouped.abs() / 2 ** (how.fraction + 1) + span / how.largest / 2 ** (how.fraction + how.exponent_bias)
    bound = step * (1 + 2**-6) + largest * 2**-11 + how.largest * 2**-25
    error = (got.unflatten(-1, (-1, how.group)) - grouped).abs()
    assert bool((error <= bound).all()), float((error - bound).max())
    assert not bool(got[1].any())


@pytest.mark.parametrize("name", FORMATS)
def test_small_values_lose_bits_with_their_scales(name: str) -> None:
    """What docs/limits.md says of values around 1e-5 and 1e-6."""
    how, errors = FORMATS[name].of_head_dim(64), {}
    x = torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(0))
    for size in (1.0, 1e-4, 1e-5, 1e-6):
        pages = QuantizedPages(*(part[None] for part in quantize(x * size, how)), how)
        errors[size] = float((load(pages, slice(None), x.dtype) / size - x).norm() / x.norm())
    assert errors[1e-4] < 1.1 * errors[1.0] and errors[1e-5] < 4 * errors[1.0]
    assert (errors[1e-6] > 0.5) == (name in ("int8", "fp8_e4m3")), "hardly anything is left"


@pytest.mark.parametrize(("name", "dim", "group"), CASES)
def test_what_is_stored_for_a_token_never_depends_on_another(name: str, dim: int, group: int | None) -> None:
    how = FORMATS[name].of_head_dim(dim, group)
    x = values(6, 2, dim)
    singles = [quantize(x[i : i + 1], how) for i in range(6)]
    for part, whole in enumerate(quantize(x, how)):
        assert torch.equal(whole, torch.cat([single[part] for single in singles]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "dim", "group"), CASES)
def test_triton_stores_the_bits_of_the_definition(name: str, dim: int, group: int | None, dtype: torch.dtype) -> None:
    how = FORMATS[name].of_head_dim(dim, group)
    k, v = values(6, 3, dim, dtype), values(6, 3, dim, dtype).flip(0)
    slots = torch.tensor([7, -1, 0, 5, 2, 3], device=DEVICE)
    got, want = ([poisoned(how, 8, 3, dim) for _ in "kv"] for _ in range(2))
    kv_write(k, v, got[0], got[1], slots)
    write.kv_write(k[slots >= 0], v[slots >= 0], want[0], want[1], slots[slots >= 0])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales.view(torch.int16), b.scales.view(torch.int16))  # NaN where nothing was written


@pytest.mark.parametrize("name", list(FORMATS))
def test_quotients_are_rounded_once(name: str) -> None:
    """Between two codes, and next to there, for scales of all bits that int8's have."""
    how = FORMATS[name].of_head_dim(256)
    halves = torch.arange(-127.5, 128, device=DEVICE)
    halves[0], halves[-1] = -127, 127
    scales = torch.cat([torch.arange(64, 128, device=DEVICE) * 2.0**power for power in (-20, -9, -1)])
    between = halves[None, :] * scales[:, None]
    x = torch.stack([between, between.nextafter(between + 1), between.nextafter(between - 1)], 1)
    slots = torch.arange(len(x), device=DEVICE)
    got, want = ([poisoned(how, len(x), 3, 256) for _ in "kv"] for _ in range(2))
    kv_write(x, x.flip(2), got[0], got[1], slots)
    write.kv_write(x, x.flip(2), want[0], want[1], slots)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


@triton.jit
def _read_kernel(pages, out_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # noqa: N803
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    row_of = ((row // 2 * 2).to(tl.int64), row % 2)
    x = load_values(pages, row_of, row < ROWS - 1, out_ptr.dtype.element_ty, D, BLOCK_D)
    tl.store(out_ptr + row[:, None] * BLOCK_D + d[None, :], x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "dim", "group"), CASES)
def test_triton_reads_the_values_of_the_definition(name: str, dim: int, group: int | None, dtype: torch.dtype) -> None:
    """Any codes and scales; a row that isn't asked for, and columns behind D, are 0."""
    how, rng = FORMATS[name].of_head_dim(dim, group), torch.Generator().manual_seed(0)
    pages = poisoned(how, 16, 2, dim)
    pages.codes.copy_(torch.randint(0, 256, pages.codes.shape, dtype=torch.uint8, generator=rng))
    pages.scales.copy_(torch.randn(pages.scales.shape, generator=rng))
    width = triton.next_power_of_2(max(16, dim))
    got = torch.full((32, width), torch.nan, dtype=dtype, device=DEVICE)
    _read_kernel[(1,)](pointers(pages), got, dim, width, 32, enable_fp_fusion=False)
    want = load(pages, slice(None), dtype).view(32, dim)
    assert torch.equal(got[:31, :dim], want[:31])
    assert not bool(got[31].any()) and not bool(got[:, dim:].any())


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_every_code_of_the_small_floats(name: str) -> None:
    """All numbers up to the largest, which makes the scale 1, and the midpoints between them: even codes win."""
    how = FORMATS[name]
    codes = torch.arange(128, dtype=torch.uint8)
    if name == "fp8":
        exponent, fraction = (codes >> 4).float(), (codes & 15) / 16
        numbers = torch.where(exponent == 0, fraction / 4, (1 + fraction) * 2 ** (exponent - 3))
    else:
        numbers = codes.view(torch.float8_e4m3fn).float()
    numbers = numbers[: int((numbers <= how.largest).sum())]
    assert numbers[-1] == how.largest
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    x = torch.cat([x, -x]).to(DEVICE)[None, None]
    how = how.of_head_dim(x.shape[-1])
    got = poisoned(how, 1, 1, x.shape[-1])
    kv_write(x, x, got, got, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert torch.equal(got.codes[0], quantize(x, how)[0])
    assert bool((got.scales == 1).all())
    assert torch.equal(got.codes[0, 0, 0, : len(numbers)].cpu(), codes[: len(numbers)])
    stored = load(got, slice(None), torch.float32)[0, 0].cpu()
    even = numbers[1:].clone()
    even[::2] = numbers[:-1:2]
    want = torch.cat([numbers, even])
    assert torch.equal(stored, torch.cat([want, -want]))


@pytest.mark.parametrize("name", FORMATS)
@given(order=st.permutations(range(24)), count=st.integers(1, 24))
def test_commit_moves_bytes_and_scales_verbatim(name: str, order: list[int], count: int) -> None:
    layout = KVLayout(2, 1, 32, torch.float32).stored_as(name)
    pages = KVPages(layout, num_blocks=3, block_size=8, device=torch.device(DEVICE))
    sides = [side for side in (*pages.k, *pages.v) if isinstance(side, QuantizedPages)]
    raw = [part.view(torch.uint8) for side in sides for part in (side.codes, side.scales)]
    assert len(raw) == 2 * 2 * 2
    for part in raw:
        part.random_(generator=torch.Generator(DEVICE).manual_seed(0))  # NaNs among them
    before = [part.flatten(0, 1).clone() for part in raw]
    src, dst = order[:count], sorted(order)[:count]
    pages.commit(src, dst)
    for old, part in zip(before, raw, strict=True):
        want = old.clone()
        want[dst] = old[src]
        assert torch.equal(part.flatten(0, 1), want)


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_nothing_leaks_from_slots_that_were_never_written(name: str) -> None:
    model = tiny_llama(head_dim=32, dtype=torch.float64)
    prompts, params = [[5, 6, 7] * 8, [3, 1, 4, 1, 5]], [SamplingParams(max_new_tokens=12)] * 2
    answers = []
    for fill in (0, 0xFF):
        engine = make_engine(model, NGramDrafter(), kv_cache_dtype=name, num_blocks=12, max_model_len=96)
        for part in engine.pages._storage:
            part.view(torch.uint8).fill_(fill)  # 0xFF: NaN in every dtype, scales too
        answers.append(outputs(run(engine, prompts, params)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", FORMATS)
def test_queries_stop_where_fp16_does(name: str) -> None:
    how = FORMATS[name].of_head_dim(64)
    pages = [poisoned(how, 16, 2, 64) for _ in "kv"]
    x = values(6, 2, 64)
    kv_write(x, x, pages[0], pages[1], torch.arange(6, device=DEVICE))
    meta, _ = build([(5, 0, [-1])], device=DEVICE)
    meta = replace(meta, block_table=torch.zeros_like(meta.block_table))
    q = torch.randn(1, 4, 64, device=DEVICE).sign().bfloat16()
    far, near = (tree_attention(q * size, *pages, meta, scale=0.1) for size in (3e38, 65536.0))
    assert torch.equal(far, near) and bool(far.isfinite().all()) and far.dtype == torch.bfloat16


@on_gpu
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_pages_of_more_than_2_to_the_31_elements(name: str) -> None:
    how = FORMATS[name].of_head_dim(128)
    block = 2**31 // (16 * 8 * how.code_width(128)) + 5
    pages = [
        QuantizedPages(
            torch.empty(block + 1, 16, 8, how.code_width(128), dtype=torch.uint8, device=DEVICE),
            torch.empty(block + 1, 16, 8, how.num_scales(128), dtype=SCALE_DTYPE, device=DEVICE),
            how,
        )
        for _ in "kv"
    ]
    x = values(6, 8, 128, torch.float16)
    kv_write(x, x, pages[0], pages[1], block * 16 + torch.arange(6, device=DEVICE))
    small = [QuantizedPages(p.codes[block:].clone(), p.scales[block:].clone(), how) for p in pages]
    for got, want in zip((small[0].codes, small[0].scales), quantize(x, how), strict=True):
        assert torch.equal(got[0, :6], want)
    meta, _ = build([(5, 0, [-1])], device=DEVICE)
    q = torch.randn(1, 8, 128, device=DEVICE).half()
    far, near = (
        tree_attention(q, *p, replace(meta, block_table=torch.full_like(meta.block_table, at)), scale=0.1)
        for p, at in ((pages, block), (small, 0))
    )
    assert torch.equal(far, near)


def on_hopper(code: str) -> list[Any]:
    """The values that lines of a program print, which compiles kernels by `tests.hopper`, in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def test_products_take_quantized_values_in_the_order_of_native_ones() -> None:
    """Where the compiler saw bytes, small tiles summed in another order than large ones: rows had other bits there."""
    orders = on_hopper("""
import re
from tests.hopper import COMPILED, attend
for name in (None, "int8", "int4"):
    attend(name, 1, chains=True)
for name, made in COMPILED:
    if name == "chain_kernel":
        print(re.findall(r"kWidth = (\\d+)", made["ttgir"]))
""")
    assert [set(order) for order in orders] == [{"2"}] * 3


def test_values_are_taken_out_of_their_codes_two_at_a_time() -> None:
    packed = on_hopper("""
from tests.hopper import COMPILED, attend
for name in (None, "fp8", "fp8_e4m3", "int8", "int4"):
    attend(name, 1, chains=True)
for name, made in COMPILED:
    if name == "chain_kernel":
        print("mul.rn.f16x2" in made["ptx"] or "fma.rn.f16x2" in made["ptx"])
""")
    assert packed == [False, True, True, True, True]


def test_kernels_let_the_next_one_begin_once_they_have_their_inputs() -> None:
    """All but large gated products, behind which a product comes; small matrices are fetched before they wait."""
    small, gated, large, large_gated = on_hopper("""
import re
from tests.hopper import COMPILED, multiply
multiply(960, 576)
multiply(1536, 576, gated=True)
multiply(4096, 4096)
multiply(14336, 4096, gated=True)
for _, made in COMPILED:
    print(re.findall(r"prefetch(?=[.]global)|(?<=griddepcontrol[.])[a-z_]+", made["ptx"]))
""")
    told, once_there = ["launch_dependents"], ["wait", "launch_dependents"]  # before it waits, if the launch says so
    assert small == ["prefetch"] * small.count("prefetch") + told + once_there and small.count("prefetch")
    assert gated == ["prefetch"] * gated.count("prefetch") + told + once_there
    assert gated.count("prefetch") == 2 * small.count("prefetch")
    assert large == told + once_there and large_gated == [*told, "wait"]
    assert not any(lets_begin("product", n, 4096) for n in range(1, 513)), "in front of a large one it says so never"


def test_attention_may_begin_while_a_rotation_waits_for_its_product() -> None:
    """What the rotation reads is loaded behind its wait: all that attention reads before its own is older."""
    [order] = on_hopper("""
import re
import torch
from specdec.kernels.gpu import rope
from tests.hopper import COMPILED
rope.overlap = lambda device: {"PDL": True, "launch_pdl": True}
pages = [torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16) for _ in "kv"]
qkv, turns = torch.zeros(2, 48, 128, dtype=torch.bfloat16), torch.zeros(2, 128)
rope.rope_write(qkv, turns, turns, *pages, torch.zeros(2, dtype=torch.int64), 32)
for _, made in COMPILED:
    print(re.findall(r"(?<=griddepcontrol[.])[a-z_]+|ld[.]global", made["ptx"]))
""")
    assert order[:3] == ["launch_dependents", "wait", "ld.global"] and order.count("wait") == 1


def test_options_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(ConfigError, match="auto or one of fp8, fp8_e4m3, int8, int4, not 'int2'"):
        EngineConfig(kv_cache_dtype="int2")
    with pytest.raises(ConfigError, match='give kv_cache_dtype="int8" or "int4" too'):
        EngineConfig(kv_group_size=64)
    tiny = tiny_llama(head_dim=80)
    with pytest.raises(ConfigError, match="one scale a head.*leave it out"):
        make_engine(tiny, kv_cache_dtype="fp8", kv_group_size=64)
    with pytest.raises(ConfigError, match="64 doesn't fit int8 at head_dim 80; use one of 8, 16"):
        make_engine(tiny, kv_cache_dtype="int8", kv_group_size=64)
    with pytest.raises(ConfigError, match="int4 needs a head_dim that one of 32, 64, 128 divides.*80.*fp8"):
        make_engine(tiny, kv_cache_dtype="int4")
    assert make_engine(tiny, kv_cache_dtype="int8").pages.layout.format == FORMATS["int8"].of_head_dim(80, 16)


def test_a_draft_models_layers_are_stored_alike() -> None:
    target = KVLayout(2, 2, 128, torch.float32).stored_as("int8", 32)
    assert KVLayout(1, 1, 64, torch.float32).like(target).format == target.format
    assert KVLayout(1, 1, 40, torch.float32).like(target).format == FORMATS["int8"].of_head_dim(40, 8)
    assert KVLayout(1, 1, 40, torch.float32).like(replace(target, format=None)).format is None
