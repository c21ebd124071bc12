"""Where captured drafts begin: roots, where their children stand, sizes of the trees. The torch reference."""

import torch
from torch import Tensor

Roots = tuple[Tensor, Tensor, Tensor]


def roots(
    history: Tensor, lengths: Tensor, prompt_lens: Tensor, has_hidden: Tensor, num_nodes: int, width: int
) -> Roots:
    """Begin the trees of heads, which have a root alone where no hidden state is known.

    Args:
        history: [S, L] int32, tokens of each sequence.
        lengths: [S] int64, tokens known; the last one is the root. 0: the sequence is inactive.
        prompt_lens: [S] int64.
        has_hidden: [S] bool, whether the hidden state that yielded the root is known.
        num_nodes: n, nodes of a whole tree.
        width: M, columns of `found`.

    Returns:
        found: [S, M] int64, the root in the first column, which is any token of inactive sequences; the others hold
            anything.
        positions: [S] int64, output position of the root's children; any for inactive sequences.
        sizes: [S] int32: n, 1 where no hidden state is known, 0 where the sequence is inactive.

    Raises:
        ValueError: the sizes differ.
    """
    check_shapes(history, lengths, prompt_lens, has_hidden)
    found = torch.empty(len(history), width, dtype=torch.int64, device=history.device)
    found[:, 0] = history.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    sizes = (1 + (num_nodes - 1) * has_hidden.int()).where(lengths > 0, 0)
    return found, (lengths - prompt_lens).clamp(min=0), sizes.to(torch.int32)


def check_shapes(history: Tensor, lengths: Tensor, prompt_lens: Tensor, has_hidden: Tensor) -> None:
    """Refuse arguments of `roots` whose sizes differ.

    Raises:
        ValueError: with the shapes.
    """
    if any(t.shape != history.shape[:1] for t in (lengths, prompt_lens, has_hidden)):
        shapes = [list(t.shape) for t in (history, lengths, prompt_lens, has_hidden)]
        raise ValueError(f"the sizes of history, lengths, prompt_lens and has_hidden differ: {shapes}")
