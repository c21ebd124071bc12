"""The loss of draft heads, without ever holding the logits of all tokens. Knows hidden states and labels; no files."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from specdec.drafters.draft_heads import DraftHeads
from specdec.training.batches import IGNORE

CHUNK_LOGITS = 1 << 26  # logits of all heads held at once: 256 MB in fp32, the gradient as much again

LMHead = Callable[[Tensor], Tensor]


class Inputs(NamedTuple):
    """What the loss of a batch reads.

    Args:
        hidden: [T, H] final hidden states; T may be 0.
        labels: [T, K] int64, IGNORE where there is none.
        following: [T, K, H] embeddings of the tokens that follow, for heads that see them.
        sources: [T, K, H] final hidden states that yield the labels: then the base's own distribution there is what
            heads learn, not the one token that was drawn from it; None for the labels alone.
    """

    hidden: Tensor
    labels: Tensor
    following: Tensor | None = None
    sources: Tensor | None = None


class HeadsLoss(nn.Module):
    """Cross-entropy of heads, those of head k times decay ** k, each the mean over its labels.

    Labels outside the heads' draft vocabulary count as 0.

    The vocabulary is projected for a few rows at a time, whose gradient is taken at once, so that logits are computed
    once and memory grows neither with rows × V nor, beyond a hidden state a head and its gradient, with rows.

    Args:
        heads: what is trained; the module's only parameters.
        lm_head: the base's head, for heads with a shared projection: as for `DraftHeads.project`.
        decay: of the loss from one head to the next.
        chunk_logits: most logits held at once.

    Sources: Cai et al., "Medusa" (2024), section 2.2.1; the gradient in the forward pass as in Hsu et al., "Liger
    Kernel" (2024); soft labels as in Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), at
    temperature 1.
    """

    def __init__(self, heads: DraftHeads, lm_head: LMHead, decay: float, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__()
        self.heads = heads
        self._lm_head = lm_head
        num_heads = heads.config.num_heads
        self.chunk_rows = max(1, chunk_logits // (num_heads * heads.config.num_columns))
        self._decays = [decay**k for k in range(num_heads)]

    def forward(self, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its parts.

        Args:
            inputs: of a batch.
            counts: [K] labels of each head over all processes; a head that has none adds nothing.

        Returns:
            The loss, a scalar, and [K], the mean cross-entropy of each head without its weight.
        """
        weights = counts.new_tensor(self._decays, dtype=torch.float64) / counts.clamp(min=1)
        states, own = self.states(inputs), _own_projection(self.heads)
        loss, sums = _ChunkedLoss.apply(self, states, inputs.labels, inputs.sources, weights, *own)  # type: ignore[no-untyped-call]
        return loss, sums / counts.clamp(min=1)

    def states(self, inputs: Inputs) -> Tensor:
        """Return what the projection reads, [T, K, H], for inputs in any dtype."""
        dtype, following = next(self.heads.parameters()).dtype, inputs.following
        return self.heads.states(inputs.hidden.to(dtype), None if following is None else following.to(dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Score the vocabulary: [R, K, H] to [R, K, V], in fp32 or better."""
        logits = self.heads.project(states, self._lm_head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy [R, K] of logits [R, K, V], 0 where there is no label or it isn't scored.

        Args:
            logits: of these rows.
            labels: [R, K].
        """
        columns = self.heads.columns_of(labels, IGNORE)
        return _crossed(logits.log_softmax(-1), columns, None).masked_fill(columns == IGNORE, 0.0)

    def gradients(
        self, states: Tensor, labels: Tensor, sources: Tensor | None, weights: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the cross-entropy of a few rows, and what the projection's inputs have for a gradient.

        Args:
            states: [R, K, H], what the projection reads.
            labels: [R, K].
            sources: [R, K, H], as in `Inputs`.
            weights: [K], by which the cross-entropies of each head are multiplied in the loss.

        Returns:
            [R, K], 0 where there is no label or it isn't scored; and the gradients of the weighted sum by `states` and
            by the heads' own projection and its bias, where there are such.
        """
        heads = self.heads
        with torch.enable_grad():
            read = states.detach().requires_grad_()
            logits = heads.project(read, self._lm_head)  # [R, K, V]
        columns = heads.columns_of(labels, IGNORE)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        guesses = logits.detach().log_softmax(-1, dtype=dtype)
        targets = None
        if sources is not None:
            targets = self._lm_head(sources.flatten(0, 1)).softmax(-1, dtype=dtype).view_as(guesses)
        losses = _crossed(guesses, columns, targets).masked_fill(columns == IGNORE, 0.0)
        slopes = guesses.exp_()  # the gradient by the logits: the heads' distribution less the target's
        if targets is None:
            slopes.scatter_add_(-1, columns.clamp(min=0)[..., None], slopes.new_full((*columns.shape, 1), -1.0))
        else:
            slopes.sub_(targets)
        slopes.mul_((weights.to(dtype) * (columns != IGNORE))[..., None])
        return losses, list(torch.autograd.grad(logits, [read, *_own_projection(heads)], slopes.to(logits.dtype)))


class _ChunkedLoss(torch.autograd.Function):
    """The weighted sum of all cross-entropies, whose gradient is known when the forward pass is over."""

    @staticmethod
    def forward(
        ctx: Any,
        module: HeadsLoss,
        states: Tensor,
        labels: Tensor,
        sources: Tensor | None,
        weights: Tensor,
        *own: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gradients = [torch.zeros_like(tensor) for tensor in (states, *own)]
        sums = torch.zeros_like(weights)
        for rows in chunks(len(states), module.chunk_rows):
            chosen = None if sources is None else sources[rows]
            losses, (by_states, *by_own) = module.gradients(states[rows], labels[rows], chosen, weights)
            sums += losses.sum(0)
            gradients[0][rows] = by_states
            for total, part in zip(gradients[1:], by_own, strict=True):
                total += part
        ctx.save_for_backward(*gradients)
        sums = sums.to(torch.promote_types(states.dtype, torch.float32))
        ctx.mark_non_differentiable(sums)
        return (sums * weights).sum().to(sums.dtype), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        by_states, *by_own = (gradient * slope for gradient in ctx.saved_tensors)
        return None, by_states, None, None, None, *by_own


def _own_projection(heads: DraftHeads) -> list[Tensor]:
    """Parameters of the heads' own projection, where there are any."""
    return [tensor for tensor in (heads.projection, heads.projection_bias) if tensor is not None]


def _crossed(guesses: Tensor, columns: Tensor, targets: Tensor | None) -> Tensor:
    """The cross-entropy [R, K] of log-probabilities [R, K, V] with columns [R, K], or with distributions [R, K, V]."""
    if targets is None:
        return -guesses.gather(-1, columns.clamp(min=0)[..., None])[..., 0]
    return -(targets * guesses).sum(-1)


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Return slices of a few rows each that make up all of them; at least one, if of no rows."""
    for start in range(0, max(1, num_rows), size):
        yield slice(start, start + size)


def sees_following(heads: DraftHeads) -> bool:
    """Whether heads read the embeddings of the draft tokens before them."""
    return heads.config.kind != "medusa"
