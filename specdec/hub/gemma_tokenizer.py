"""Gemma 3's tokenizer, rebuilt from the list of tokens in a GGUF file: the same as Google's `tokenizer.json`.

transformers makes another one of it: 5.17 a Unigram model without <bos>, 5.24 merges in another order, so that runs of
seven and more spaces come apart.
"""

from collections.abc import Sequence
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE = "▁"  # what stands for a space inside the model
_SPECIAL = frozenset(
    ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]
)


class TokenType(IntEnum):
    """GGUF's kinds of tokens, as far as they matter here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


def build(tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Build the tokenizer; `encode` puts <bos> first.

    Args:
        tokens: of the vocabulary, by id, as GGUF spells them: a run of spaces is real spaces.
        types: GGUF's type of each token, see `TokenType`.
    """
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, types), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Replace(" ", _SPACE)
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    whole = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)]
    core.add_tokens([AddedToken(token, normalized=False, special=token in _SPECIAL) for token in whole])
    return core


def _merges(vocab: dict[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    """Derive the merges, best first: every way to cut a token in two tokens.

    A token's rank is its place among the normal ones; runs of white space, which are user-defined, come before all.
    """
    first = types.index(TokenType.NORMAL)
    ranked = [
        (0 if types[i] == TokenType.USER_DEFINED else i - first, token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    ranked.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in ranked]
