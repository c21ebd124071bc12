"""How heads rank their candidates in captured steps: without logits where the projection is a plain product.

Knows heads and hidden states; no trees.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.protocol import DeviceQuery, HasMatrix
from specdec.kernels.ops import TRITON_DTYPES

Matrix = tuple[Tensor, Tensor | None]


class DeviceCandidates:
    """Finds the best candidates of states.

    Args:
        heads: the heads.
        lm_head: what a shared projection calls.
    """

    def __init__(self, heads: DraftHeads, lm_head: Callable[[Tensor], Tensor]) -> None:
        self._heads, self._lm_head = heads, lm_head

    def of_head(self, head: int, query: DeviceQuery, positions: Tensor, states: Tensor, out: Tensor) -> None:
        """Write the best tokens of the states of one head.

        Args:
            head: which one; it predicts the token `head` positions behind the root's children.
            query: the S sequences.
            positions: [S] int64, output positions of the roots' children.
            states: [S, P, H], those of P paths in each sequence.
            out: [S, P, k] int64, written in place: token ids, best first.
        """
        own = self._heads.projection, self._heads.projection_bias
        matrix = self._shared() if own[0] is None else (own[0][head], None if own[1] is None else own[1][head])
        if matrix is None or not _fits(matrix, states):
            logits = self._heads.project(states.flatten(0, 1)[:, None], self._lm_head, head)
            at = (positions + head).unsqueeze(1).expand(states.shape[:2])
            self._rank(query, at, logits.squeeze(1), out)
        else:
            self._find(query, positions, states, out, matrix, head, 0)

    def of_heads(self, query: DeviceQuery, positions: Tensor, states: Tensor, out: Tensor) -> None:
        """Write the best tokens of the first K' heads; states are [S, K', H] and `out` is [S, K', k]."""
        matrix = self._shared() if self._heads.projection is None else None
        if matrix is None or not _fits(matrix, states):
            at = positions.unsqueeze(1) + torch.arange(states.shape[1], device=positions.device)
            self._rank(query, at, self._heads.project(states, self._lm_head).flatten(0, 1), out)
        else:
            self._find(query, positions, states, out, matrix, 0, 1)

    def _shared(self) -> Matrix | None:
        return self._lm_head.matrix if isinstance(self._lm_head, HasMatrix) else None

    def _find(
        self, query: DeviceQuery, positions: Tensor, states: Tensor, out: Tensor, matrix: Matrix, ahead: int, step: int
    ) -> None:
        from specdec.kernels.gpu.candidates import candidates

        drawn, ids = (query.temperature, query.seeds, positions), self._heads.token_ids
        candidates(states.contiguous(), *matrix, *drawn, out, ahead=ahead, step=step, token_ids=ids)

    def _rank(self, query: DeviceQuery, positions: Tensor, logits: Tensor, out: Tensor) -> None:
        from specdec.kernels.gpu.rank import rank

        _, num_rows, num_ranks = out.shape
        drawn, ids = (query.temperature, query.seeds, positions.flatten()), self._heads.token_ids
        out.copy_(rank(logits, *drawn, num_ranks, num_rows, ids).view_as(out))


def _fits(matrix: Matrix, states: Tensor) -> bool:
    """Whether the kernel takes that product."""
    dtypes = {states.dtype, *(part.dtype for part in matrix if part is not None)}
    return len(dtypes) == 1 and states.dtype in TRITON_DTYPES and matrix[0].is_contiguous()
