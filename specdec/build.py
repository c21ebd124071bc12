"""Puts an engine together from a loaded Hugging Face model, a drafter and a rule."""

import difflib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.drafters.heads import base_fingerprint
from specdec.drafters.protocol import Drafter, DraftTarget
from specdec.drafters.registry import make_drafter
from specdec.engine.config import EngineConfig
from specdec.engine.cost import CostKey, CostTable, device_name, find_table
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.kernels.linear import linear
from specdec.models.cachecheck import check_cache
from specdec.models.decoder import Decoder
from specdec.models.head import DecoderHead, OutputHead
from specdec.models.hf import HFModel
from specdec.models.load import make_target
from specdec.models.support import quantized_how
from specdec.verifier.rules import AcceptanceRule, make_rule


def build_engine(
    model: PreTrainedModel,
    drafter: str | PreTrainedModel | Drafter,
    config: EngineConfig,
    *,
    rule: str | AcceptanceRule = "coupled",
    drafter_options: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eos_token_ids: Collection[int] = (),
    num_real_tokens: int | None = None,
    seed: int | None = None,
    cost_table: CostTable | Literal["auto"] | None = None,
    packed: Decoder | HFModel | None = None,
) -> Engine:
    """Build the engine that runs a loaded model. The weights stay the model's own.

    Where keys and values are quantized, a short text is run both ways first, with a warning if that hurts this model.

    Args:
        model: checked and in evaluation mode, as `specdec.hub.load` returns it.
        drafter: as for `LLM`: a name, a path, a loaded model to draft with, or a `Drafter`.
        config: sizes.
        rule: the acceptance rule or its name.
        drafter_options: keyword arguments of the drafter.
        tokenizer: for texts and stop strings; None works on token ids alone.
        eos_token_ids: tokens that end an answer.
        num_real_tokens: ids from here on pad the vocabulary and are never emitted; None for no such ids.
        seed: of the seeds drawn for requests that have none.
        cost_table: measured step times, which set the trees' node budgets; "auto" takes what `specdec tune` measured
            for this model on this device, if it did; None gives each tree all that `config` allows; see `Engine`.
        packed: what `make_target` made of the model, where that is done already.

    Raises:
        UnsupportedModel, CheckpointError: the model or the heads can't be used.
        ConfigError: an option is unknown or out of bounds, or the file of the cost table is broken.
    """
    packed = packed or make_target(model, config.deterministic, config.prepack)
    engine = Engine(
        packed,
        make_drafter(drafter, draft_target(model, packed, tokenizer), **(drafter_options or {})),
        make_rule(rule) if isinstance(rule, str) else rule,
        config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        num_real_tokens=min(packed.vocab_size, num_real_tokens or packed.vocab_size),
        seed=seed,
        cost_table=_cost_table(cost_table, model, config, packed.prepacked),
    )
    if engine.pages.layout.format is not None:
        report = check_cache(packed, engine.pages.layout, tokenizer)
        if report.hurts:
            warnings.warn(report.warning, UserWarning, stacklevel=3)
    return engine


def draft_target(
    model: PreTrainedModel, packed: Decoder | HFModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> DraftTarget:
    """Return what a drafter may know of a model.

    Args:
        model: the model.
        packed: what `make_target` made of it.
        tokenizer: its tokenizer, if there is one.
    """
    product = packed.ops.linear if isinstance(packed, Decoder) else linear
    return DraftTarget(
        hidden_size=packed.hidden_size,
        vocab_size=packed.vocab_size,
        device=packed.device,
        dtype=packed.dtype,
        lm_head=DecoderHead(packed) if isinstance(packed, Decoder) else packed.logits,
        fingerprint=base_fingerprint(model),
        model=packed,
        tokenizer=tokenizer,
        embed=model.get_input_embeddings(),
        head_rows=partial(OutputHead, model, linear=product),
    )


def cost_key(
    model: PreTrainedModel, deterministic: bool = True, kv_cache: str = "auto", prepacked: bool = False
) -> CostKey:
    """Return what a cost table must have been measured for to be true of a model as it is loaded here.

    Args:
        model: the model.
        deterministic, kv_cache: as in `CostKey`.
        prepacked: whether what runs it multiplies by prepacked weights.
    """
    how = [*quantized_how(model), *(["prepacked"] if prepacked else [])]
    dtype = "-".join([str(model.dtype).removeprefix("torch."), *how])
    name = device_name(model.device)
    return CostKey(base_fingerprint(model), name, dtype, str(torch.__version__), deterministic, kv_cache)


def _cost_table(given: object, model: PreTrainedModel, config: EngineConfig, prepacked: bool) -> CostTable | None:
    if given is None or isinstance(given, CostTable):
        return given
    if given != "auto":
        raise ConfigError(f'cost_table must be a CostTable, "auto" or None, not {given!r}')
    return find_table(cost_key(model, config.deterministic, config.kv_cache_name, prepacked))


def engine_config(options: Mapping[str, Any], owner: str) -> EngineConfig:
    """Turn keyword arguments into the engine's options.

    Raises:
        ConfigError: one is unknown or out of bounds; `owner` names who was given it.
    """
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(known)}"
            raise ConfigError(f"{owner} has no option {name!r}; {hint}")
    return EngineConfig(**options)
