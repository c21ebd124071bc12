"""Moves accepted keys and values to where a plain decoder would have written them, all layers in one launch."""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

_MAX_MOVES = 64  # a program holds all the moves of a sequence at once
_SIZES = (4, 16, _MAX_MOVES)  # moves that kernels are compiled for
_TILE = 4096
_RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(
    do_not_specialize=["from_slots", "to_slots", "N"],
    do_not_specialize_on_alignment=["src_ptr", "dst_ptr"],  # parts of one tensor
)
def _kv_commit_kernel(
    from_ptr, to_ptr, src_ptr, dst_ptr, from_slots, to_slots, N, WIDTH,
    IN_PLACE: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    side, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a side is a layer's keys or its values
    sequence = tl.program_id(2)
    move = tl.arange(0, MOVES)
    src = tl.load(src_ptr + sequence * N + move, mask=move < N, other=-1)
    dst = tl.load(dst_ptr + sequence * N + move, mask=move < N, other=-1)
    moves = (src >= 0) & (dst >= 0)
    if IN_PLACE:
        moves = moves & (src != dst)
    col = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = moves[:, None] & (col < WIDTH)
    staged = tl.load(from_ptr + (side * from_slots + src[:, None]) * WIDTH + col, mask=mask)  # [MOVES, BLOCK]
    tl.debug_barrier()  # no warp may write a slot that another has yet to read
    tl.store(to_ptr + (side * to_slots + dst[:, None]) * WIDTH + col, staged, mask=mask)


def kv_commit(storage: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slots verbatim in every layer; source and destination ranges may overlap.

    Args:
        storage: [layers, 2, num_slots, num_kv_heads, D], contiguous, written in place.
        src: [M] int64, slots to read, all before any is written; more than 64 are staged in memory first. Or [B, n],
            n ≤ 64, the moves of B sequences, of which none reads or writes another's slots, in one launch. -1 here
            or in dst moves nothing.
        dst: src's shape, distinct slots to write.

    Raises:
        ValueError: a shape is not one of these, or storage is not contiguous.
    """
    if storage.dim() != 5 or not storage.is_contiguous():
        raise ValueError(f"storage must be contiguous and of 5 dimensions, not {list(storage.shape)}")
    if src.shape != dst.shape or src.dim() not in (1, 2) or (src.dim() == 2 and src.shape[1] > _MAX_MOVES):
        raise ValueError(f"src {list(src.shape)} and dst {list(dst.shape)} must be equal, [M] or [B, n ≤ {_MAX_MOVES}]")
    raw = (
        storage.view(_RAW[storage.itemsize]).flatten(0, 1).flatten(2)
    )  # [sides, num_slots, width], no float's rounding
    if src.dim() == 2 or len(src) <= _MAX_MOVES:
        _move(raw, raw, torch.atleast_2d(src), torch.atleast_2d(dst))
        return
    staged = raw.index_select(1, src.clamp(min=0))
    order = torch.arange(len(src), device=src.device).where(src >= 0, -1)
    _move(staged, raw, _in_groups(order), _in_groups(dst))


def _in_groups(slots: torch.Tensor) -> torch.Tensor:
    """[M] → [groups, 64], padded with −1."""
    return F.pad(slots, (0, -len(slots) % _MAX_MOVES), value=-1).view(-1, _MAX_MOVES)


def _move(source: torch.Tensor, target: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Launch the moves [B, n] from a tensor [sides, slots, width] to another, or within one."""
    sides, _, width = target.shape
    sequences, n = src.shape
    moves = next(size for size in _SIZES if size >= n)
    block = min(triton.next_power_of_2(width), _TILE // moves, 1024)
    _kv_commit_kernel[(sides, triton.cdiv(width, block), sequences)](
        source, target, src.contiguous(), dst.contiguous(), source.shape[1], target.shape[1], n, width,
        IN_PLACE=source is target, MOVES=moves, BLOCK=block,
    )  # fmt: skip
