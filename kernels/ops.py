"""The one place that chooses between the Triton kernels and their torch references."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.kernels import activation, attention, commit, linear, norm, rope, spread, write

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32_SHARED_MEMORY = 164_352
"""Bytes of shared memory that a program of attention takes in fp32, with heads of 128 values."""


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each op that a model needs. The references' docstrings say what each does.

    Args:
        name: "torch" or "triton", as `specdec info` shows it.
        linear: `specdec.kernels.linear.linear`.
        gated_linear: `specdec.kernels.linear.gated_linear`.
        act_mul: `specdec.kernels.activation.act_mul`.
        rmsnorm, add_rmsnorm: those of `specdec.kernels.norm`.
        rope_write: `specdec.kernels.rope.rope_write`.
        kv_write: `specdec.kernels.write.kv_write`.
        spread: `specdec.kernels.spread.spread`.
        tree_attention: `specdec.kernels.attention.tree_attention`.
        kv_commit: `specdec.kernels.commit.kv_commit`.
    """

    name: str
    linear: Callable[..., torch.Tensor]
    gated_linear: Callable[..., torch.Tensor]
    act_mul: Callable[..., torch.Tensor]
    rmsnorm: Callable[..., torch.Tensor]
    add_rmsnorm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_write: Callable[..., torch.Tensor]
    kv_write: Callable[..., None]
    spread: Callable[..., torch.Tensor]
    tree_attention: Callable[..., torch.Tensor]
    kv_commit: Callable[..., None]


TORCH_OPS = Ops(
    name="torch",
    linear=linear.linear,
    gated_linear=linear.gated_linear,
    act_mul=activation.act_mul,
    rmsnorm=norm.rmsnorm,
    add_rmsnorm=norm.add_rmsnorm,
    rope_write=rope.rope_write,
    kv_write=write.kv_write,
    spread=spread.spread,
    tree_attention=attention.tree_attention,
    kv_commit=commit.kv_commit,
)


def choose_ops(device: torch.device, dtype: torch.dtype, deterministic: bool = True) -> Ops:
    """Return the ops for tensors of that kind: the Triton kernels where they can run, the references elsewhere.

    Args:
        device: where the tensors are.
        dtype: of weights and activations.
        deterministic: a row's bits don't depend on how many rows there are; else large products are the library's.
    """
    return triton_ops(deterministic) if why_not_triton(device, dtype) is None else TORCH_OPS


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what the Triton kernels would need for tensors of that kind; None if they can run."""
    if device.type != "cuda":
        return "a GPU"
    if dtype not in TRITON_DTYPES:
        return f"one of {', '.join(str(x).removeprefix('torch.') for x in TRITON_DTYPES)}"
    if dtype == torch.float32:
        from specdec.kernels.gpu.launch import shared_memory

        if shared_memory(device) < FLOAT32_SHARED_MEMORY:
            return "float16 or bfloat16 on this GPU, whose programs have too little shared memory for float32"
    return None


def triton_ops(deterministic: bool = True) -> Ops:
    """Return the Triton kernels. They need a GPU, or Triton's interpreter."""
    from specdec.kernels.gpu import activation, attention, commit, fast, linear, norm, rope, spread, write

    products = linear if deterministic else fast
    return Ops(
        name="triton" if deterministic else "triton, not deterministic",
        linear=products.linear,
        gated_linear=products.gated_linear,
        act_mul=activation.act_mul,
        rmsnorm=norm.rmsnorm,
        add_rmsnorm=norm.add_rmsnorm,
        rope_write=rope.rope_write,
        kv_write=write.kv_write,
        spread=spread.spread,
        tree_attention=attention.tree_attention,
        kv_commit=commit.kv_commit,
    )
