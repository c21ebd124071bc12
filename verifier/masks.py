"""What must not be chosen at a node: no_repeat_ngram_size, bad words, min_new_tokens, allowed and suppressed ids.

Knows nodes and scores. All of them set scores to -inf, so their order doesn't matter. The meaning of each is that of
transformers' processor of the same name; `min_new_tokens` also masks the request's own stop tokens.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec.params import MAX_WORD_LEN, SamplingParams
from specdec.verifier.nodes import NodeContext, VerifyQuery, change_where


def mask_banned(scores: Tensor, nodes: Sequence[NodeContext]) -> Tensor:
    """Set the scores of banned tokens to -inf.

    Args:
        scores: [R, V] float32 or float64; never changed.
        nodes: the R rows' contexts.
    """

    def mask(chosen: Tensor, asking: Sequence[NodeContext]) -> Tensor:
        banned = torch.stack([_banned(node, scores.shape[-1], scores.device) for node in asking])
        return chosen.masked_fill(banned, -torch.inf)

    return change_where(_masks, scores, nodes, mask)


def always_banned(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Return the ids that are banned at every position, `allowed_token_ids` left aside."""
    words = {word[0] for word in params.bad_words_ids if len(word) == 1}
    return words.difference(eos_token_ids).union(params.suppress_tokens)


def ending_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Return the ids that end the answer: `min_new_tokens` bans them until its floor."""
    return set(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)


def _masks(params: SamplingParams) -> object:
    return (
        params.no_repeat_ngram_size
        or params.bad_words_ids
        or params.min_new_tokens
        or params.suppress_tokens
        or params.allowed_token_ids
    )


def _banned(node: NodeContext, vocab_size: int, device: torch.device) -> Tensor:
    """[V] bool: what is banned at a node. Shared by nodes: read only."""
    query, params = node.query, node.params
    if node.position < params.min_new_tokens:
        banned = query.once("banned before the floor", lambda: _static(query, vocab_size, device, True))
    else:
        banned = query.once("banned", lambda: _static(query, vocab_size, device, False))
    if completing := _completing(node):
        banned = banned.index_fill(0, torch.tensor(completing, device=device), True)
    if params.no_repeat_ngram_size:
        banned = banned | _repeating(node.prefix(device), params.no_repeat_ngram_size, vocab_size)
    return banned


def _static(query: VerifyQuery, vocab_size: int, device: torch.device, before_floor: bool) -> Tensor:
    """[V] bool: what is banned whatever the prefix."""
    params = query.params
    ids = always_banned(params, query.eos_token_ids)
    if before_floor:
        ids |= ending_tokens(params, query.eos_token_ids)
    banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    if params.allowed_token_ids is not None:
        banned = (~banned).index_fill(0, torch.tensor(params.allowed_token_ids, device=device), False)
    known = [token for token in ids if token < vocab_size]  # a config may name an EOS token that has no logit
    return banned.index_fill(0, torch.tensor(known, dtype=torch.int64, device=device), True)


def _completing(node: NodeContext) -> list[int]:
    """Tokens that would complete a bad word of two or more."""
    words = [word for word in node.params.bad_words_ids if len(word) > 1]
    tail = node.tail(MAX_WORD_LEN - 1) if words else ()
    return [word[-1] for word in words if word[-2] == tail[-1] and tail[1 - len(word) :] == word[:-1]]


def _repeating(prefix: Tensor, size: int, vocab_size: int) -> Tensor:
    """[V] bool: tokens that would repeat an n-gram of the prefix [L]."""
    banned = torch.zeros(vocab_size + 1, dtype=torch.bool, device=prefix.device)  # the last one takes what is no match
    if len(prefix) < size:
        return banned[:-1]
    windows = prefix.unfold(0, size, 1)  # [L + 1 - n, n]
    matches = (windows[:, :-1] == prefix[len(prefix) + 1 - size :]).all(-1)
    ids = windows[:, -1].clamp(max=vocab_size).where(matches, vocab_size)
    return banned.index_fill(0, ids, True)[:-1]
