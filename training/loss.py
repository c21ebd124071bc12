"""The loss of draft heads, without ever holding the logits of all tokens. Knows hidden states and labels; no files."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

    The vocabulary is projected for a few rows at a time, and again in the backward pass, so that memory grows neither
    with rows × V nor, beyond a hidden state a head, with rows.

    Args:
        heads: what is trained; the module's only parameters.
        lm_head: the base's head, [R, H] to [R, V], for heads with a shared projection.
        decay: of the loss from one head to the next.
        chunk_logits: most logits held at once.

    Sources: Cai et al., "Medusa" (2024), section 2.2.1; the recomputation as in Hsu et al., "Liger Kernel" (2024);
    soft labels as in Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), at temperature 1.
    """

    def __init__(self, heads: DraftHeads, lm_head: LMHead, decay: float, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__()
        self.heads = heads
        self._lm_head = lm_head
        num_heads = heads.config.num_heads
        self.chunk_rows = max(1, chunk_logits // (num_heads * heads.config.vocab_size))
        self._decays = [decay**k for k in range(num_heads)]

    def forward(self, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its parts.

        Args:
            inputs: of a batch.
            counts: [K] labels of each head over all processes; a head that has none adds nothing.

        Returns:
            The loss, a scalar, and [K], the mean cross-entropy of each head without its weight.
        """
        states, sources = self.states(inputs), inputs.sources
        sums = torch.stack(
            [
                checkpoint(
                    self._sums,
                    states[rows],
                    inputs.labels[rows],
                    None if sources is None else sources[rows],
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for rows in chunks(len(states), self.chunk_rows)
            ]
        ).sum(0)
        means = sums / counts.clamp(min=1)
        return (means * means.new_tensor(self._decays)).sum(), means.detach()

    def states(self, inputs: Inputs) -> Tensor:
        """Return what the projection reads, [T, K, H], for inputs in any dtype."""
        dtype, following = next(self.heads.parameters()).dtype, inputs.following
        return self.heads.states(inputs.hidden.to(dtype), None if following is None else following.to(dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Score the vocabulary: [R, K, H] to [R, K, V], in fp32 or better."""
        logits = self.heads.project(states, self._lm_head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _sums(self, states: Tensor, labels: Tensor, sources: Tensor | None) -> Tensor:
        """The cross-entropy of each head summed over a few rows, [K]."""
        logits = self.logits(states).flatten(0, 1)
        if sources is None:
            losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
            return losses.view_as(labels).sum(0)
        with torch.no_grad():
            targets = self._lm_head(sources.flatten(0, 1)).to(logits.dtype).softmax(-1)
        losses = F.cross_entropy(logits, targets, reduction="none").view_as(labels)
        return losses.masked_fill(labels == IGNORE, 0.0).sum(0)


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Return slices of a few rows each that make up all of them; at least one, if of no rows."""
    for start in range(0, max(1, num_rows), size):
        yield slice(start, start + size)


def sees_following(heads: DraftHeads) -> bool:
    """Whether heads read the embeddings of the draft tokens before them."""
    return heads.config.kind != "medusa"
