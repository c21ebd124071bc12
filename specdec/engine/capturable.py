"""Which engines and which requests run captured steps, and why the others don't. Captures nothing itself."""

from specdec.drafters.protocol import Drafter, DraftsOnDevice
from specdec.engine.request import Request
from specdec.models.decoder import Decoder
from specdec.models.protocol import PackedModel
from specdec.params import SamplingParams
from specdec.verifier.rules import AcceptanceRule, CoupledRule


def why_not_captured(model: PackedModel) -> str | None:
    """Return why a model's forward can't be captured, or None if it can."""
    if not isinstance(model, Decoder):
        return "the model runs by its own forward"
    if model.quantized_by is not None:
        return f"quantized weights run by {model.quantized_by}'s own products"
    if not model.ops.name.startswith("triton"):
        return f"the model runs by {model.ops.name} ops, not by Triton kernels"
    return None


def why_no_graph(model: PackedModel, drafter: Drafter, rule: AcceptanceRule) -> str | None:
    """Return why the steps of an engine can't be captured, or None if they can."""
    if (why := why_not_captured(model)) is not None:
        return why
    if not isinstance(drafter, DraftsOnDevice):
        return f"drafter {drafter.name!r} drafts on the host"
    return None if isinstance(rule, CoupledRule) else f"rule {rule.name!r} runs on the host"


def why_eager(request: Request) -> str | None:
    """Return why a request can't be part of a captured step, or None if it can."""
    for name in EAGER_PARAMETERS:
        if getattr(request.params, name) != getattr(_PLAIN, name):
            return name
    return "scores or logits are kept" if request.keep_scores or request.keep_logits else None


_PLAIN = SamplingParams()
EAGER_PARAMETERS = (
    "logprobs",
    "min_new_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "allowed_token_ids",
    "logits_processors",
)
"""Parameters that a captured step has no kernel for."""
