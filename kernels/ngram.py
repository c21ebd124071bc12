"""Prompt lookup over token histories on the device: one chain a sequence. The torch reference.

Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

import torch
from torch import Tensor

MAX_LOOKUP = 8
"""Longest match that may be asked for."""

Chains = tuple[Tensor, Tensor, Tensor, Tensor]


def ngram_chain(history: Tensor, lengths: Tensor, num_nodes_max: int, lookup_max: int, lookup_min: int) -> Chains:
    """Draft what followed the longest earlier occurrence of each sequence's last tokens, as a chain.

    Of equally long matches the most recent counts. A continuation that runs into the end of the sequence goes on
    repeating itself from its start, as that of `drafters.ngram` does.

    Args:
        history: [S, L] int32, tokens of each sequence.
        lengths: [S] int64, tokens known, at most L; the last one is the root. 0: the sequence is inactive.
        num_nodes_max: n, nodes of a chain, root included; 1 to 64.
        lookup_max: longest match, 1 to 8.
        lookup_min: shortest match, 1 to `lookup_max`.

    Returns:
        tokens: [S, n] int64, root first; padded with 0.
        parents: [S, n] int64, -1, 0, 1, …, also where there is padding.
        num_nodes: [S] int32: n; 1 where nothing matches; 0 where inactive.
        match: [S] int32, tokens that matched, or 0.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_bounds(history, lengths, num_nodes_max, lookup_max, lookup_min)
    match, start = _longest_match(history, lengths.unsqueeze(1), lookup_max, lookup_min)  # [S, 1] each
    node = torch.arange(num_nodes_max, device=history.device)
    period = (lengths.unsqueeze(1) - start).clamp(min=1)
    source = (start + (node - 1) % period).where(node > 0, lengths.unsqueeze(1) - 1)
    num_nodes = torch.where(match > 0, num_nodes_max, 1).where(lengths.unsqueeze(1) > 0, 0)
    tokens = history.long().gather(1, source.clamp(min=0)).where(node < num_nodes, 0)
    parents = (node - 1).repeat(len(history), 1)
    return tokens, parents, num_nodes.squeeze(1).int(), match.squeeze(1).int()


def _longest_match(history: Tensor, lengths: Tensor, lookup_max: int, lookup_min: int) -> tuple[Tensor, Tensor]:
    """[S, 1] each: the length of the best match and the position behind it; 0 and 0 where there is none."""
    capacity = history.shape[1]
    position = torch.arange(capacity, device=history.device)
    same = position < lengths
    run = torch.zeros_like(history)  # [S, L]: how many tokens before each position are the last ones
    for back in range(1, lookup_max + 1):
        last = history.gather(1, (lengths - back).clamp(min=0))
        same = same & (history.roll(back, 1) == last) & (position >= back)
        run += same
    key = (run.long() * capacity + position).where(run >= lookup_min, 0)
    best = key.amax(1, keepdim=True)
    return best // capacity, best % capacity


def check_bounds(history: Tensor, lengths: Tensor, num_nodes_max: int, lookup_max: int, lookup_min: int) -> None:
    """Refuse arguments of `ngram_chain` that are out of bounds.

    Raises:
        ValueError: with the argument.
    """
    if history.shape[:1] != lengths.shape:
        raise ValueError(f"history must be [S, L] and lengths [S], not {list(history.shape)} and {list(lengths.shape)}")
    if not 1 <= num_nodes_max <= 64:
        raise ValueError(f"num_nodes_max must be from 1 to 64, not {num_nodes_max}")
    if not 1 <= lookup_min <= lookup_max <= MAX_LOOKUP:
        raise ValueError(f"lookups must be 1 ≤ shortest ≤ longest ≤ {MAX_LOOKUP}, not {lookup_min} and {lookup_max}")
