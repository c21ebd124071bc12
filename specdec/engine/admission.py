"""What a request may ask of this model, checked before any work is done for it. Knows sizes, not the model."""

from collections.abc import Collection, Iterator, Sequence

from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.params import SamplingParams
from specdec.verifier.masks import always_banned, ending_tokens


def check_prompt(prompt: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that can't be run.

    Raises:
        ContextLengthExceeded: it leaves no room for an answer.
        InvalidRequest: it is empty, or holds what is no id of the vocabulary.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if len(prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and the context limit is {max_model_len}, "
            "one of which must be left for the answer; shorten the prompt or raise max_model_len"
        )
    for token in prompt:
        if not isinstance(token, int):
            raise InvalidRequest(f"token ids must be whole numbers, not {token!r:.80}")
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab_size} tokens")


def check_token_ids(
    params: SamplingParams, vocab_size: int, num_real_tokens: int, eos_token_ids: Collection[int]
) -> None:
    """Refuse parameters that don't fit the vocabulary.

    Raises:
        InvalidRequest: one names an id outside the vocabulary, or together they ban every token.
    """
    for name, ids in _named_ids(params):
        bad = next((token for token in ids if token >= vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"{name} holds token id {bad}, outside the vocabulary of {vocab_size} tokens")
    banned = always_banned(params, eos_token_ids)
    if params.min_new_tokens:
        banned |= ending_tokens(params, eos_token_ids)
    if params.allowed_token_ids is not None:
        num_left = sum(token < num_real_tokens and token not in banned for token in params.allowed_token_ids)
    else:
        num_left = num_real_tokens - sum(token < num_real_tokens for token in banned)
    if not num_left:
        raise InvalidRequest(
            "allowed_token_ids, suppress_tokens, bad_words_ids and min_new_tokens together leave no token to choose; "
            "loosen one of them"
        )


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, Collection[int]]]:
    yield "stop_token_ids", params.stop_token_ids
    yield "logit_bias", params.logit_bias
    yield "suppress_tokens", params.suppress_tokens
    yield "allowed_token_ids", params.allowed_token_ids or ()
    for word in params.bad_words_ids:
        yield "bad_words_ids", word
