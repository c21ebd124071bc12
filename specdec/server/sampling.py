"""From what a client sent to `SamplingParams`."""

from hashlib import sha256

from starlette.requests import Request

from specdec.errors import InvalidRequest
from specdec.params import MAX_SEED, SamplingParams
from specdec.server.config import ServerConfig
from specdec.server.protocol import ChatRequest, CompletionRequest, SamplingRequest

COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion; that of a chat is what the context has room for."""


def cache_salt(request: Request, config: ServerConfig) -> str | None:
    """Return what keeps the request's cached prefix from other tenants; None where nobody is told apart.

    Tenants are told apart by the header that the configuration names, else by their API keys.

    Raises:
        InvalidRequest: the header is missing.
    """
    if config.tenant_header is not None:
        tenant = request.headers.get(config.tenant_header)
        if not tenant:
            raise InvalidRequest(f"the header {config.tenant_header}, which names the tenant, is missing")
    elif config.api_keys:
        tenant = request.headers["authorization"]
    else:
        return None
    return sha256(tenant.encode()).hexdigest()


def chat_params(body: ChatRequest, max_model_len: int, salt: str | None) -> SamplingParams:
    """Return what a chat asks for.

    Raises:
        InvalidRequest: the values contradict each other.
    """
    limit = body.max_completion_tokens or body.max_tokens or max_model_len
    return _params(body, min(limit, max_model_len), (body.top_logprobs or 0) if body.logprobs else None, salt)


def completion_params(body: CompletionRequest, max_model_len: int, salt: str | None) -> SamplingParams:
    """Return what a completion asks for.

    Raises:
        InvalidRequest: the values contradict each other.
    """
    return _params(body, min(body.max_tokens or COMPLETION_TOKENS, max_model_len), body.logprobs, salt)


def _params(body: SamplingRequest, max_new_tokens: int, logprobs: int | None, salt: str | None) -> SamplingParams:
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
        cache_salt=salt,
    )
