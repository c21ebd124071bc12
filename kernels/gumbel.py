"""Counter-based noise for sampling: the torch reference of the bits that Triton's `tl.philox` makes.

Knows tensors only. The noise of a token is a function of (request seed, output position, token id) and of
nothing else, so it can be drawn anywhere, in any order, for any subset of the vocabulary.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_LOW_32 = 0xFFFFFFFF
_WORDS = 4  # one counter yields four output words

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Run the ten rounds of Philox4x32-10.

    Args:
        counter: four int64 tensors of words in [0, 2^32), of shapes that broadcast.
        key: two int64 tensors of words in [0, 2^32), of shapes that broadcast with the counter's.

    Returns:
        The four output words, int64 in [0, 2^32), in the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products need 64 unsigned bits; int64 wraps, but holds the same bits. Only the words that get
        # multiplied are cut to 32 bits each round: the upper bits of the others fall away at the next cut.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_LOW_32)
        c2 = ((product_0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_LOW_32)
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW_32, (k1 + _KEY_STEP_1) & _LOW_32
    return c0, c1 & _LOW_32, c2, c3 & _LOW_32


def philox_uint32(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Return one random word for each of the first `num_tokens` token ids.

    Tokens 4i to 4i + 3 get the four words of counter (i, position, 0, 0) under the seed's two halves as key
    (low half first): what `tl.philox(seed, i, position, 0, 0)` returns for uint32 counters.

    Args:
        seeds: [R] int64, the request's seed.
        positions: [R] int64, output position in [0, 2^32).
        num_tokens: how many token ids, counted from 0.

    Returns:
        [R, num_tokens] int64 in [0, 2^32).
    """
    groups = torch.arange(-(-num_tokens // _WORDS), device=seeds.device)
    words = torch.stack(_token_words(seeds, positions, groups.unsqueeze(0)), dim=-1)  # [R, groups, 4]
    return words.flatten(1)[:, :num_tokens]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for a whole vocabulary; see `gumbel_noise_at` for a few ids.

    Args:
        seeds: [R] int64, the request's seed.
        positions: [R] int64, output position in [0, 2^32).
        vocab_size: V.

    Returns:
        [R, V] float32, between -3.14 and 22.88.
    """
    return _gumbel(philox_uint32(seeds, positions, vocab_size))


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of some token ids: the same numbers as `gumbel_noise` gathered at them.

    Args:
        seeds: [R] int64, the request's seed.
        positions: [R] int64, output position in [0, 2^32).
        token_ids: [R, k] int64.

    Returns:
        [R, k] float32.
    """
    words = torch.stack(_token_words(seeds, positions, token_ids // _WORDS), dim=-1)  # [R, k, 4]
    return _gumbel(words.gather(-1, (token_ids % _WORDS).unsqueeze(-1)).squeeze(-1))


def _token_words(seeds: Tensor, positions: Tensor, groups: Tensor) -> Words4:
    """The four words of each group of four token ids; `groups` is [R or 1, n] int64, each word [R, n]."""
    seed = seeds.unsqueeze(1)  # [R, 1]
    zero = seed.new_zeros(1, 1)
    return philox4x32((groups, positions.unsqueeze(1), zero, zero), (seed & _LOW_32, (seed >> 32) & _LOW_32))


def _gumbel(words: Tensor) -> Tensor:
    """-log(-log u) of u = (word + 0.5) / 2^32, as float32.

    The logarithms run in float64: CPUs and GPUs disagree in their last bit, which float32 rounds away (but
    for about one value in 2^28). u is exact, never 0 or 1.
    """
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
