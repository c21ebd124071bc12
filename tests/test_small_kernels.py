"""The small Triton kernels give what the torch references give in a wider dtype, and touch nothing else."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec.kernels import activation as reference_activation
from specdec.kernels import norm as reference_norm
from specdec.kernels import rope as reference_rope
from specdec.kernels.gpu.activation import act_mul
from specdec.kernels.gpu.commit import kv_commit
from specdec.kernels.gpu.norm import add_rmsnorm, rmsnorm
from specdec.kernels.gpu.rope import rope_write
from specdec.kernels.gpu.write import kv_write
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close

pytestmark = pytest.mark.gpu if ON_GPU else []  # so that `pytest -m gpu` runs them for real
EPS = 1e-5
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def pages(heads: int, dim: int, dtype: torch.dtype, blocks: int = 3, block_size: int = 4) -> Tensor:
    """Poisoned pages: what is not written stays NaN."""
    return torch.full((blocks, block_size, heads, dim), torch.nan, dtype=dtype, device=DEVICE)


# --- norms


@pytest.mark.parametrize("width", [1, 8, 77, 1000, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm(dtype: torch.dtype, width: int) -> None:
    x, weight = randn(3, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    assert_close(rmsnorm(x, weight, EPS), reference_norm.rmsnorm(x.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_of_heads_in_a_slice(dtype: torch.dtype) -> None:
    x = randn(3, 7, 48, dtype=dtype)[:, 1:6, :40]
    for weight in (randn(5, 40, dtype=dtype, seed=1), randn(40, dtype=dtype, seed=1)):
        got = rmsnorm(x, weight, EPS)
        assert got.is_contiguous()
        assert_close(got, reference_norm.rmsnorm(x.double(), weight.double(), EPS))


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_rounds_where_torch_rounds(dtype: torch.dtype, wide_weight: bool) -> None:
    x = integers([[i * i % 7 - 3 for i in range(64)]]).to(dtype)  # squares of small integers: the sum is exact
    weight = randn(64, dtype=torch.float32 if wide_weight else dtype)
    got, want = rmsnorm(x, weight, EPS), reference_norm.rmsnorm(x, weight, EPS)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0 if dtype != torch.float32 else 1e-6, atol=0)


@pytest.mark.parametrize("width", [8, 77, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rmsnorm(dtype: torch.dtype, width: int) -> None:
    delta, residual = randn(3, width + 3, dtype=dtype)[:, 2:-1], randn(3, width, dtype=dtype, seed=1)
    weight = randn(width, dtype=dtype, seed=2)
    out, total = add_rmsnorm(delta, residual, weight, EPS)
    assert torch.equal(total, residual + delta)
    assert_close(out, reference_norm.rmsnorm(total.double(), weight.double(), EPS))


def lone_row(x: Tensor) -> Tensor:
    """A row as torch may hand it over: with a stride that means nothing."""
    return torch.as_strided(x, (1, x.shape[1]), (1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    rows = 64 if ON_GPU else 16
    x, delta = randn(rows, 576, dtype=dtype), randn(rows, 576, dtype=dtype, seed=1)
    weight = randn(576, dtype=dtype, seed=2)
    ops: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, delta: rmsnorm(x, weight, EPS),
        lambda x, delta: rmsnorm(x.view(-1, 9, 64), weight.view(9, 64), EPS).flatten(1),
        lambda x, delta: torch.cat(add_rmsnorm(delta, x, weight, EPS), -1),
        lambda x, delta: act_mul(x, "silu"),
        lambda x, delta: act_mul(x, "gelu_pytorch_tanh"),
    ]
    for op in ops:
        whole = op(x, delta)
        assert torch.equal(op(x[:7], delta[:7]), whole[:7])
        assert torch.equal(op(x[:1], delta[:1]), whole[:1])
        assert torch.equal(op(lone_row(x), lone_row(delta)), whole[:1])


# --- activations


@pytest.mark.parametrize("name", sorted(reference_activation.ACTIVATIONS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_act_mul(dtype: torch.dtype, name: str) -> None:
    gate_up = randn(3, 2 * 1037 + 5, dtype=dtype)[:, 3:-2]
    gate_up[0, :4] = torch.tensor([-300.0, 300.0, -9.0, 0.0])
    assert_close(act_mul(gate_up, name), reference_activation.act_mul(gate_up.double(), name))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("name", sorted(reference_activation.ACTIVATIONS))
def test_act_mul_of_what_is_not_finite_or_has_no_exponential(name: str) -> None:
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, -1e30, 1e30, -100.0, 100.0]], device=DEVICE)
    got = act_mul(torch.cat([gate, torch.ones_like(gate)], 1), name)
    want = reference_activation.act_mul(torch.cat([gate, torch.ones_like(gate)], 1).double(), name).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_mul_rounds_before_the_product(dtype: torch.dtype) -> None:
    gate_up = randn(2, 128, dtype=dtype) * 2
    want = reference_activation.act_mul(gate_up, "silu")
    got = act_mul(gate_up, "silu")
    assert (got == want).double().mean() > (0.95 if dtype != torch.float32 else 0.2)


# --- rotary embedding and page writes


@pytest.mark.parametrize(("dim", "width"), [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64), (8, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write(dtype: torch.dtype, dim: int, width: int) -> None:
    num_heads, kv_heads = 5, 2
    qkv = randn(4, num_heads + 2 * kv_heads + 1, dim + 8, dtype=dtype)[:, 1:, :dim]
    cos, sin = randn(4, width, dtype=dtype, seed=1), randn(4, width + 2, dtype=dtype, seed=2)[:, :width]
    slots, kept = integers([9, -1, 0, 6]), integers([0, 2, 3])
    k, v = pages(kv_heads, dim, dtype), pages(kv_heads, dim, dtype)
    q = rope_write(qkv, cos, sin, k, v, slots, num_heads)

    wide = [x.double() for x in (qkv, cos, sin)]
    want_k, want_v = pages(kv_heads, dim, torch.float64), pages(kv_heads, dim, torch.float64)
    want_q = reference_rope.rope_write(*wide, want_k.clone(), want_v.clone(), integers([0, 1, 2, 3]), num_heads)
    reference_rope.rope_write(*[x[kept] for x in wide], want_k, want_v, slots[kept], num_heads)
    assert_close(q, want_q)
    assert torch.equal(k.isnan(), want_k.isnan()) and torch.equal(v.isnan(), want_v.isnan())
    assert_close(k.nan_to_num(), want_k.nan_to_num())
    assert torch.equal(v.double().nan_to_num(), want_v.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_bits_of_a_row_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    qkv, cos, sin = randn(64, 4, 64, dtype=dtype), randn(64, 64, dtype=dtype), randn(64, 64, dtype=dtype, seed=1)
    k, v = (torch.zeros(64, 1, 1, 64, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.arange(64, device=DEVICE)
    q = rope_write(qkv, cos, sin, k, v, slots, 2)
    for n in (1, 7):
        few_k, few_v = torch.zeros_like(k), torch.zeros_like(v)
        assert torch.equal(rope_write(qkv[:n], cos[:n], sin[:n], few_k, few_v, slots[:n], 2), q[:n])
        assert torch.equal(few_k[:n], k[:n]) and torch.equal(few_v[:n], v[:n])


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (5, 80), (2, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write(dtype: torch.dtype, heads: int, dim: int) -> None:
    kv = randn(4, 2 * heads, dim, dtype=dtype)
    k_pages, v_pages = pages(heads, dim, dtype), pages(heads, dim, dtype)
    want_k, want_v = k_pages.clone().flatten(0, 1), v_pages.clone().flatten(0, 1)
    kv_write(kv[:, :heads], kv[:, heads:], k_pages, v_pages, integers([11, -1, -1, 3]))
    want_k[[11, 3]], want_v[[11, 3]] = kv[[0, 3], :heads], kv[[0, 3], heads:]
    assert torch.equal(k_pages.flatten(0, 1).nan_to_num(), want_k.nan_to_num())
    assert torch.equal(v_pages.flatten(0, 1).nan_to_num(), want_v.nan_to_num())
    assert torch.equal(k_pages.flatten(0, 1).isnan(), want_k.isnan())


@on_gpu
def test_pages_of_more_than_2_to_the_31_elements() -> None:
    last = 2**31 // 1024 + 5
    k, v = (torch.empty(last + 1, 1, 8, 128, dtype=torch.float16, device=DEVICE) for _ in range(2))
    qkv, cos = randn(1, 17, 128, dtype=torch.float16), torch.ones(1, 128, dtype=torch.float16, device=DEVICE)
    rope_write(qkv, cos, cos * 0, k, v, integers([last]), 1)
    assert torch.equal(k[last, 0], qkv[0, 1:9]) and torch.equal(v[last, 0], qkv[0, 9:])
    kv_write(qkv[:, :8], qkv[:, 8:16], k, v, integers([last]))
    assert torch.equal(k[last, 0], qkv[0, :8]) and torch.equal(v[last, 0], qkv[0, 8:16])


# --- commit


def moved(storage: Tensor, src: list[int], dst: list[int]) -> Tensor:
    """The bytes that plain Python would leave."""
    want, old = storage.clone(), storage.clone()
    for s, d in zip(src, dst, strict=True):
        if s >= 0 and d >= 0:
            want[:, :, d] = old[:, :, s]
    return want


def random_bytes(slots: int, heads: int, dim: int, dtype: torch.dtype, layers: int = 2) -> Tensor:
    """[layers, 2, slots, heads, dim] of any bits: NaNs of many payloads among them."""
    shape = (layers, 2, slots, heads, dim * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([[3, 4, 6, 7], [13, 12, 11, 10]], [[2, 3, 4, 5], [10, 11, 12, 13]]),  # shifted, reversed
        ([[1, -1, 5], [-1, -1, -1]], [[0, 2, -1], [-1, 9, 8]]),
        ([[5, 6]], [[5, 7]]),
        ([3, 4, 5], [2, 3, 4]),
        ([], []),
    ],
)
def test_kv_commit(dtype: torch.dtype, src: list[list[int]], dst: list[list[int]]) -> None:
    storage = random_bytes(15, 3, 40, dtype)
    flat = [torch.tensor(x).flatten().tolist() for x in (src, dst)]
    want = moved(storage.view(torch.uint8), *flat)
    kv_commit(storage, integers(src).long(), integers(dst).long())
    assert torch.equal(storage.view(torch.uint8), want)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (100,)])
def test_kv_commit_of_many_slots(shape: tuple[int, ...]) -> None:
    storage = random_bytes(128, 2, 40, torch.float16, layers=1)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    src, dst = order[: shape[-1]].clone(), order.sort().values[: shape[-1]]
    src[5], dst[70:71] = -1, -1
    want = moved(storage.view(torch.uint8), src.tolist(), dst.tolist())
    kv_commit(storage, src.view(shape).to(DEVICE), dst.view(shape).to(DEVICE))
    assert torch.equal(storage.view(torch.uint8), want)


@on_gpu
def test_a_large_overlapping_commit_stages_all_sources() -> None:
    storage = random_bytes(8 * 64, 8, 128, torch.bfloat16, layers=8)
    src = torch.arange(1, 8 * 64 + 1, device=DEVICE).view(8, 64)
    src[:, -1] = src[:, 0] - 1  # every sequence turns around in its own slots
    dst = torch.arange(8 * 64, device=DEVICE).view(8, 64)
    want = moved(storage.view(torch.uint8), src.flatten().tolist(), dst.flatten().tolist())
    kv_commit(storage, src, dst)
    assert torch.equal(storage.view(torch.uint8), want)


# --- all of them


@on_gpu
def test_a_graph_reads_slots_at_replay() -> None:
    x, weight = randn(2, 64, dtype=torch.float16), randn(64, dtype=torch.float16, seed=1)
    qkv, cos = randn(2, 3, 64, dtype=torch.float16), randn(2, 64, dtype=torch.float16)
    storage = torch.zeros(1, 2, 12, 1, 64, dtype=torch.float16, device=DEVICE)
    k, v = storage[0].view(2, 3, 4, 1, 64)
    slots, src, dst = integers([0, 1]), integers([[0, 1]]), integers([[1, 2]])

    def step() -> tuple[Tensor, ...]:
        out, total = add_rmsnorm(x, x, weight, EPS)
        q = rope_write(qkv, cos, cos, k, v, slots, 1)
        kv_write(q, q, k, v, slots + 8)
        kv_commit(storage, src, dst)
        kv_commit(storage, torch.full((70,), -1, device=DEVICE), torch.full((70,), -1, device=DEVICE))
        return rmsnorm(q, weight, EPS), act_mul(out, "gelu"), total

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    storage.zero_()
    slots.copy_(integers([2, -1]))
    src.copy_(integers([[2, -1]]))
    dst.copy_(integers([[3, 0]]))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))
    assert storage[0, 0].flatten(1).any(1).nonzero().flatten().tolist() == [2, 3, 7, 10]


def test_fp64_stays_fp64() -> None:
    dtype = torch.float64
    x, weight = randn(2, 64, dtype=dtype) / 3, randn(64, dtype=dtype, seed=1)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(rmsnorm(x, weight, EPS), reference_norm.rmsnorm(x, weight, EPS))
    for name in reference_activation.ACTIVATIONS:
        close(act_mul(x, name), reference_activation.act_mul(x, name))
    qkv, k, v = x.view(2, 4, 16), pages(1, 16, dtype), pages(1, 16, dtype)
    slots = integers([1, 0])
    args = (qkv, weight[:32].view(2, 16), weight[32:].view(2, 16))
    want_k, want_v = k.clone(), v.clone()
    close(rope_write(*args, k, v, slots, 2), reference_rope.rope_write(*args, want_k, want_v, slots, 2))
    close(k, want_k, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    x, k = randn(2, 6), pages(1, 8, torch.float32)
    qkv, cos = randn(2, 3, 8), randn(2, 8)
    storage, slots = random_bytes(4, 1, 8, torch.float32), integers([0, 1])
    wrong: list[Callable[[], object]] = [
        lambda: rmsnorm(x[0], x[0], EPS),
        lambda: rmsnorm(x, x[0, :5], EPS),
        lambda: rmsnorm(x.t(), x[:, 0], EPS),
        lambda: add_rmsnorm(x, x.half(), x[0], EPS),
        lambda: act_mul(x, "mish"),
        lambda: act_mul(x[:, :5], "silu"),
        lambda: rope_write(qkv, cos, cos, k, k, slots, 2),
        lambda: rope_write(qkv, cos[:, :7], cos[:, :7], k, k, slots, 1),
        lambda: rope_write(qkv, cos, cos, k.transpose(0, 1), k.transpose(0, 1), slots, 1),
        lambda: kv_write(qkv, qkv, k, k, slots),
        lambda: kv_write(qkv[:, :1], qkv[:, :1], k.transpose(0, 1), k.transpose(0, 1), slots),
        lambda: kv_commit(storage[:, :, 1:], slots, slots),
        lambda: kv_commit(storage, slots, slots[:1]),
        lambda: kv_commit(storage, slots.new_zeros(1, 65), slots.new_zeros(1, 65)),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
