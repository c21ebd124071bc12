"""Puts `kernels/gpu/direct.py` in the place of the kernels whose states it leaves as they do."""

from collections.abc import Callable
from functools import partial
from typing import Any

from specdec.kernels.gpu import attention
from specdec.kernels.gpu.direct import WARPS, direct_kernel
from specdec.kernels.work import AttentionWork

SIZES = ("H", "G", "D", "BLOCK_D", "TILE", "SMALL", "NUM", "LARGE", "enable_fp_fusion", "PDL", "launch_pdl")
"""What `merge_kernel` takes of what `chain_kernel` does."""

Launch = Callable[..., None]
"""Takes a grid, what `direct_kernel` takes, and its launch options."""


def on_device(grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
    """Launch it."""
    direct_kernel[grid](*args, num_warps=WARPS.value, enable_fp_fusion=False, **options)


class Direct:
    """Stands for `chain_kernel` or `context_kernel`, as `tree_attention` launches them.

    Args:
        work: what is launched.
        launch: how.
    """

    def __init__(self, work: AttentionWork, launch: Launch = on_device) -> None:
        self.work, self.launch = work, launch

    def __getitem__(self, grid: tuple[int, int, int]) -> Launch:
        return partial(self._run, grid)

    def _run(self, grid: tuple[int, int, int], q: Any, k: Any, v: Any, *rest: Any, **how: Any) -> None:
        work, chains = self.work, self.work.arrived is not None
        state = rest[1:4] if chains else rest[:3]  # behind the result of chains
        constants = how["H"], how["G"], how["BLOCK_SIZE"], how["SMALL"], how["NUM"], how["LARGE"], how["PDL"]
        self.launch(
            grid, q, k, v, *state, work.tree_tiles, work.block_table, work.context_lens, work.positions, work.ancestors,
            work.block_table.stride(0), len(q), rest[-2], chains, *constants, launch_pdl=how["PDL"],
        )  # fmt: skip
        if chains:
            sizes = {name: how[name] for name in SIZES}
            attention.merge_kernel[(len(q), how["G"])](
                rest[0], *state, work.positions, work.ancestors, len(q), BLOCK_M=16, num_warps=2, **sizes
            )
