"""From the arguments of `generate` to a call for the engine, or the reason why it is none.

Transformers' own code merges the configs, resolves the special tokens and checks the lengths, so that its errors and
warnings are the same.
"""

from typing import Any

from transformers import GenerationMixin

from specdec.errors import UnsupportedModel
from specdec.hf.call import Call, Given, NotOurs
from specdec.hf.criteria import read_criteria
from specdec.hf.fields import not_followed
from specdec.hf.prompts import read_input_ids, token_limits, without_padding
from specdec.hf.sampling import read_params, read_processors, row_params

_PREPARING = (
    "_prepare_generation_config",
    "_prepare_special_tokens",
    "_prepare_generated_length",
    "_validate_generated_length",
)
_NOT_FOLLOWED = ("assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate")


def check_transformers(model: Any) -> None:
    """Check that the model's `generate` is transformers' usual one, and that its parts that prepare a call are there.

    Raises:
        UnsupportedModel: the class has a `generate` of its own, or this version lacks a part.
    """
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:
        raise UnsupportedModel(f"{type(model).__name__} has a generate of its own, which does something else")
    missing = [name for name in _PREPARING if not hasattr(model, name)]
    if missing:
        raise UnsupportedModel(
            f"this version of transformers has no {', '.join(missing)}, which accelerate() needs; use 5.17 to 5.24"
        )


def read_call(model: Any, given: Given, tokenizer: Any, vocab_size: int, max_model_len: int) -> Call:
    """Turn a call's arguments into work for the engine.

    Args:
        model: the accelerated model.
        given: the arguments.
        tokenizer: for stop strings where the call brings none.
        vocab_size: ids that the model scores.
        max_model_len: most tokens that the engine holds of one row.

    Raises:
        NotOurs: the engine can't do what is asked for.
        ValueError: as transformers' own code raises it.
    """
    kwargs = dict(given.kwargs)
    own_tokenizer = kwargs.pop("tokenizer", None)
    config, rest = model._prepare_generation_config(given.generation_config, **kwargs)
    _refuse(given, config, rest)
    ids, mask = read_input_ids(given.inputs, rest.get("input_ids")), rest.get("attention_mask")
    model._prepare_special_tokens(config, mask is not None, device=ids.device, batch_size=len(ids))
    eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
    pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
    rows = without_padding(ids, mask, pad, eos)
    copies = config.num_return_sequences or 1
    criteria = read_criteria(config, given.stopping_criteria, tokenizer if own_tokenizer is None else own_tokenizer)
    _refuse_batch(given, bool(criteria), eos, len(rows) * copies)
    processors = read_processors(config, given.logits_processor, given.prefix_allowed_tokens_fn)
    limits = token_limits(model, given, config, ids, max(map(len, rows)), max_model_len)
    shared = read_params(config, limits, [token for token in eos if 0 <= token < vocab_size])
    return Call(
        input_ids=ids.repeat_interleave(copies, dim=0),
        prompts=[row for row in rows for _ in range(copies)],
        params=row_params(shared, processors, given.prefix_allowed_tokens_fn, len(rows), copies),
        criteria=criteria,
        pad_token_id=pad,
        streamer=given.streamer,
        as_dict=bool(config.return_dict_in_generate),
        output_scores=bool(config.return_dict_in_generate and config.output_scores),
        output_logits=bool(config.return_dict_in_generate and config.output_logits),
        warning=_lookup_warning(config.prompt_lookup_num_tokens),
    )


def _refuse(given: Given, config: Any, rest: dict[str, Any]) -> None:
    """Refuse what only transformers does, by name."""
    reasons = not_followed(config)
    reasons += [name for name in _NOT_FOLLOWED if getattr(given, name) is not None]
    reasons += ["synced_gpus"] if given.synced_gpus else []
    followed = {"input_ids", "attention_mask", *(reason.partition("=")[0] for reason in reasons)}
    reasons += [name for name, value in rest.items() if value is not None and name not in followed]
    if reasons:
        raise NotOurs(", ".join(reasons))


def _refuse_batch(given: Given, has_criteria: bool, eos_token_ids: list[int], num_rows: int) -> None:
    if num_rows == 1:
        return
    if given.streamer is not None:
        raise NotOurs(f"a streamer for {num_rows} rows")
    if has_criteria and not eos_token_ids:
        raise NotOurs("stopping criteria for several rows without an EOS token, where rows that have ended go on")


def _lookup_warning(num_tokens: int | None) -> str | None:
    if num_tokens is None:
        return None
    return f"prompt_lookup_num_tokens={num_tokens} changes nothing: the drafter given to accelerate() is used"
