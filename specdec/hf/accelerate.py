"""`accelerate(model)`: `model.generate` runs through the engine, with transformers' own arguments and results."""

import os
import warnings
from collections.abc import Mapping
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as all_modules
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.build import build_engine, engine_config
from specdec.drafters.protocol import Drafter
from specdec.drafters.registry import check_drafter
from specdec.engine.engine import Engine
from specdec.engine.request import Request
from specdec.errors import ConfigError, InvalidRequest, UnsupportedModel
from specdec.hf.arguments import check_transformers, read_call
from specdec.hf.call import Call, Given, NotOurs
from specdec.hf.criteria import row_stopping
from specdec.hf.results import assemble
from specdec.hub.load import load
from specdec.models.decoder import Decoder
from specdec.models.load import make_target
from specdec.outputs import Completion


class Accelerated:
    """An engine in the place of a model's `generate`; made by `accelerate`.

    Calls of several threads wait for each other. As a context manager it restores the model at the end.

    Args:
        model: the model, its weights shared with the engine.
        engine: runs the calls; its blocks persist between them. None if it can't run the model.
        tokenizer: for stop strings where a call brings none.
        reason: why there is no engine.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reason: str = "",
    ) -> None:
        self.model, self.engine = model, engine
        self.completions: list[Completion] = []
        """How the rows of the last call went, see `Completion.stats`; empty if transformers ran it."""
        self._tokenizer, self._reason = tokenizer, reason
        self._replaced = vars(model).get("generate")
        self._original: Any = model.generate
        self._parts = _parts(model)
        self._turn, self._running = RLock(), False
        model.generate = self._pass_on if engine is None else self.generate

    def restore(self) -> None:
        """Give the model its own `generate` back."""
        if self._replaced is None:
            del self.model.generate
        else:
            self.model.generate = self._replaced

    def __reduce__(self) -> str:
        raise ConfigError("an accelerated model can't be copied or pickled; call specdec.restore(model) first")

    def __enter__(self) -> "Accelerated":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _accelerated(self.model) is self:
            self.restore()

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers' `generate` does; see there for the arguments and `accelerate` for differences.

        Returns:
            [B, S + T] int64 sequences, or a `GenerateDecoderOnlyOutput`.
        """
        given = Given(
            inputs=inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            synced_gpus=synced_gpus,
            assistant_model=assistant_model,
            streamer=streamer,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            custom_generate=custom_generate,
            kwargs=kwargs,
        )
        with self._turn:
            return self._answer(given)

    def _answer(self, given: Given) -> Any:
        state = torch.get_rng_state()
        self.completions = []
        try:
            engine = self._check_model()
            limit = engine.limits.max_model_len
            call = read_call(self.model, given, self._tokenizer, engine.model.vocab_size, limit)
            requests = self._run(engine, call)
        except NotOurs as reason:
            why = str(reason)
        else:
            if call.warning:
                warnings.warn(call.warning, UserWarning, stacklevel=4)
            self.completions = [request.completion() for request in requests]
            return assemble(call, requests)
        _warn(why, stacklevel=5)
        torch.set_rng_state(state)  # as if nothing had been drawn
        return self._original(**given.as_arguments())

    def _pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for `generate` where there is no engine: models of other kinds name other arguments."""
        _warn(self._reason, stacklevel=3)
        return self._original(*args, **kwargs)

    def _run(self, engine: Engine, call: Call) -> list[Request]:
        """Run the rows to their ends; blocks are free again whatever happens."""
        engine.reset_prefix_cache()  # the weights may have been updated in place since the last call
        if isinstance(engine.model, Decoder):
            engine.model.refresh()
        requests: list[Request] = []
        self._running = True
        try:
            self._add(engine, call, requests)
            num_streamed = 0
            if call.streamer is not None:
                call.streamer.put(call.input_ids.cpu())
            while any(request.finish_reason is None for request in requests):
                engine.step()
                for request in requests:
                    request.check()
                if call.streamer is not None:
                    for token in requests[0].tokens[requests[0].prompt_len + num_streamed :]:
                        call.streamer.put(torch.tensor([token]))
                    num_streamed = requests[0].num_output
            if call.streamer is not None:
                call.streamer.end()
            return requests
        finally:
            self._running = False
            for request in requests:
                engine.abort(request)

    def _add(self, engine: Engine, call: Call, requests: list[Request]) -> None:
        """Queue the rows, each as soon as it is admitted, into `requests`."""
        stopping = row_stopping(call, call.input_ids.device)
        scores, logits = call.output_scores, call.output_logits
        try:
            for prompt, params in zip(call.prompts, call.params, strict=True):
                requests.append(engine.add(prompt, params, stopping=stopping, keep_scores=scores, keep_logits=logits))
        except InvalidRequest as error:
            raise NotOurs(str(error)) from error

    def _check_model(self) -> Engine:
        """Return the engine, unless it would answer by other weights or without what the user hung into the model."""
        if self.engine is None:
            raise NotOurs(self._reason)
        if self._running:
            raise NotOurs("it is made within another call, by a processor, a criterion or a streamer")
        if self.model.training:
            raise NotOurs("the model is in training mode")
        if _parts(self.model) != self._parts:
            raise NotOurs(
                "modules or weights were moved or replaced since accelerate(); restore and accelerate the model again"
            )
        if _hooked_everywhere() or any(_hooked(module) for module in self.model.modules()):
            raise NotOurs("forward hooks are on the model")
        if (changed := next((name for name, m in self.model.named_modules() if _own_forward(m)), None)) is not None:
            raise NotOurs(f"{changed or 'the model'} has a forward of its own, which isn't its class's")
        return self.engine


def accelerate(
    model: PreTrainedModel,
    drafter: str | Drafter = "auto",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Accelerated:
    """Make `model.generate` run through speculative decoding, with transformers' own arguments and results.

    The weights are shared, not copied: the model's forward still works, and an optimizer's steps count for the next
    call. What the engine can't do goes to transformers' own `generate` with one `UserWarning` that names the reason; so
    does every call of a model that it can't run, e.g. an encoder-decoder. The results are the same, but for these:

    - Sampling follows the same distribution with other tokens: each row has its own seed, drawn from torch's global
      generator, so that `torch.manual_seed` makes it repeatable.
    - Each row is run as if alone and without padding, wherever its padding stands. Transformers is right only for
      padding on the left. Logits processors and stopping criteria get the row alone, ids [1, L] without padding;
      processors may be called for a few positions behind a stop, whose tokens are then dropped.
    - `scores` and `logits` behind the end of a row are 0 for the padding token and -inf else.
    - The dictionary of `return_dict_in_generate` holds no cache.

    Transformers' own ways to speculate are not combined with ours. A call with `prompt_lookup_num_tokens` is run with
    the drafter given here, and a warning says so; one with `assistant_model` goes to transformers.

    Args:
        model: a loaded model that has `generate`; it is put into evaluation mode.
        drafter: as for `LLM`: "auto" takes n-grams and, where some come with the package for this model, then heads.
        tokenizer: for stop strings where a call brings none.
        drafter_options: keyword arguments of the drafter.
        engine_options: fields of `EngineConfig`: max_model_len, max_num_seqs, num_blocks, block_size, …. Here weights
            are prepacked only if `prepack` is True, and then anew at each call, as they may have been updated.

    Returns:
        A context manager that restores the model; `restore` does so too. Its `completions` tell how the last call
        went. Its `engine` is None where no call can be run by it.

    Raises:
        UnsupportedModel: the model is no transformers model or has no `generate`, or a draft model can't be run.
        CheckpointError: the heads or the draft model can't be read, or belong to another model.
        ConfigError: the model is accelerated already, or the drafter or an option is unknown or out of bounds.
    """
    config = engine_config(engine_options, "accelerate")
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"accelerate takes a loaded model, not {str(model)!r}; LLM opens models by name")
    if _accelerated(model) is not None:
        raise ConfigError("the model is accelerated already; call specdec.restore(model) first")
    check_drafter(drafter, **(drafter_options or {}))
    loaded = load(model, dtype="auto", device=getattr(model, "device", "cpu"), tokenizer=tokenizer)
    if not hasattr(loaded.model, "generate"):
        raise UnsupportedModel(f"{type(model).__name__} has no generate; load it with its head, e.g. as a causal LM")
    try:
        check_transformers(loaded.model)
        packed = make_target(loaded.model, config.deterministic, bool(config.prepack))
    except UnsupportedModel as reason:
        return Accelerated(loaded.model, None, reason=str(reason))
    engine = build_engine(loaded.model, drafter, config, drafter_options=drafter_options, packed=packed)
    return Accelerated(loaded.model, engine, loaded.tokenizer)


def restore(model: PreTrainedModel) -> None:
    """Undo `accelerate`: `model.generate` is transformers' own again.

    Raises:
        ConfigError: the model isn't accelerated.
    """
    accelerated = _accelerated(model)
    if accelerated is None:
        raise ConfigError("the model isn't accelerated; specdec.accelerate(model) comes first")
    accelerated.restore()


def _warn(reason: str, stacklevel: int) -> None:
    warnings.warn(f"transformers' own generate runs this call: {reason}", UserWarning, stacklevel=stacklevel)


def _accelerated(model: PreTrainedModel) -> Accelerated | None:
    owner = getattr(getattr(model, "__dict__", {}).get("generate"), "__self__", None)
    return owner if isinstance(owner, Accelerated) else None


def _parts(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """What the engine was built on: in-place updates of parameters reach it, other parts don't."""
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    return [*kinds, *((name, parameter.data_ptr()) for name, parameter in model.named_parameters())]


def _hooked(module: torch.nn.Module) -> bool:
    """Whether a module has hooks besides transformers' own, which only record what it computes."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def _hooked_everywhere() -> bool:
    """Whether torch calls a hook for every module there is."""
    return bool(all_modules._global_forward_pre_hooks or all_modules._global_forward_hooks)


def _own_forward(module: torch.nn.Module) -> bool:
    """Whether a module runs something else than its class says; a compiled forward computes the same."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
