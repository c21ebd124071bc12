"""Our two names in transformers' attention registries. Knows transformers' calling convention, no pages and no batch.

The registered functions hold no state: during a call of ours, each attention module carries the function that answers
for it, and outside of such a call nothing of ours is on the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from specdec.errors import UnsupportedModel

PACKED = "specdec"
"""Rows of a packed batch. The model gets no mask: the batch says who sees what."""
SURVEY = "specdec-survey"
"""One plain sequence. Each layer's mask is its window, see `window_code`."""

Attend = Callable[..., torch.Tensor]
"""(module, query [1, heads, N, D], key, value [1, kv heads, N, D], mask, **options) → [1, N, heads, D]."""

_ANSWER = "_specdec_attend"
_REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config that the modules of a model read, each once."""
    found = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    return list(found.values())


@contextmanager
def answering(
    configs: Sequence[PreTrainedConfig], implementation: str, answers: Mapping[nn.Module, Attend]
) -> Iterator[None]:
    """Let functions of ours answer for attention modules; afterwards the model is as it was.

    Args:
        configs: the model's, from `configs_of`.
        implementation: `PACKED` or `SURVEY`.
        answers: the function of each module.
    """
    before = [c._attn_implementation_internal for c in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = implementation
        for module, answer in answers.items():
            setattr(module, _ANSWER, answer)
        yield
    finally:
        for module in answers:
            vars(module).pop(_ANSWER, None)
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation_internal = value


def refuse_options(module: nn.Module, dropout: float, is_causal: bool | None, options: Mapping[str, Any]) -> None:
    """Refuse what would change the result of attention and ours doesn't do.

    Raises:
        UnsupportedModel: the message names it.
    """
    named = [what for name, what in _REFUSED.items() if options.get(name) is not None]
    if dropout:
        named.append(f"dropout {dropout} (call model.eval() first)")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        named.append("attention that is not causal")
    if named:
        raise UnsupportedModel(f"{type(module).__name__} asks for {named[0]}, which specdec's attention doesn't do")


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    answer: Attend | None = getattr(module, _ANSWER, None)
    if answer is None:
        raise UnsupportedModel(f"{type(module).__name__} attends in this call but did not when the model was loaded")
    return answer(module, query, key, value, attention_mask, **options), None


def window_code(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: Any,
    device: Any,
    local_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """The mask of a survey: [1, 1, q_length, kv_length] int64, filled with the window, 0 where there is none.

    The window is read off the mask function at far positions, because a short prompt doesn't show it. A tensor of a
    mask's shape survives what models do to masks; one that was changed on the way is no longer constant.

    Raises:
        UnsupportedModel: some row sees other keys than a causal window.
    """
    end = getattr(config, "max_position_embeddings", None) or kv_length
    last = end - 1
    query = torch.tensor(sorted({0, 1, last // 3, last // 2, last // 2 + 1, max(last - 1, 0), last}), device=device)
    query, key = query.view(1, 1, -1, 1), torch.arange(end, device=device).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    seen = mask_function(zero, zero, query, key).expand(1, 1, query.numel(), end)
    window = int(seen[0, 0, -1].sum())
    if not torch.equal(seen, (key <= query) & (key > query - window)):
        raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    code = window if window < end else local_size or 0
    return torch.full((1, 1, q_length, kv_length), code, device=device)


AttentionInterface.register(PACKED, _attend)  # and no mask function: then transformers makes no mask
AttentionInterface.register(SURVEY, _attend)
AttentionMaskInterface.register(SURVEY, window_code)
