"""From what a client sent to `SamplingParams`."""

from specdec.params import MAX_SEED, SamplingParams
from specdec.server.protocol import ChatRequest, CompletionRequest, SamplingRequest

COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion; that of a chat is what the context has room for."""


def chat_params(body: ChatRequest, max_model_len: int) -> SamplingParams:
    """Return what a chat asks for.

    Raises:
        InvalidRequest: the values contradict each other.
    """
    limit = body.max_completion_tokens or body.max_tokens or max_model_len
    return _params(body, min(limit, max_model_len), (body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionRequest, max_model_len: int) -> SamplingParams:
    """Return what a completion asks for.

    Raises:
        InvalidRequest: the values contradict each other.
    """
    return _params(body, min(body.max_tokens or COMPLETION_TOKENS, max_model_len), body.logprobs)


def _params(body: SamplingRequest, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
    speculation = body.speculation
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed & MAX_SEED,
        n=body.n,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens,
        min_new_tokens=body.min_tokens,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): value for token, value in body.logit_bias.items()},
        num_speculative_tokens=speculation.num_speculative_tokens if speculation.enabled else 0,
    )
