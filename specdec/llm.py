"""The Python API: `LLM(model, drafter=...)`, then `generate`, `chat` or `stream`."""

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from numbers import Number
from operator import index
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.build import build_engine, engine_config
from specdec.drafters.protocol import Drafter
from specdec.encode import Encoder
from specdec.engine.cost import CostTable
from specdec.engine.request import Request
from specdec.errors import ConfigError, InvalidRequest
from specdec.hub.load import Loaded, load
from specdec.hub.quantize import quantization_config
from specdec.models.load import why_not_on
from specdec.outputs import Completion, StreamChunk
from specdec.params import SamplingParams
from specdec.verifier.rules import AcceptanceRule

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]


class LLM:
    """A target model and a drafter, ready to generate. Not for several threads at once.

    Args:
        model: a folder, a hub id, a name that `specdec pull` knows, or a loaded Hugging Face model.
        drafter: "auto" takes n-grams and then the draft heads that come with the package for this model, or n-grams
            alone where there are none; or "none", "ngram", "shipped", "medusa:PATH", "hydra:PATH", "recurrent:PATH",
            "draft_model:PATH", "early_exit", the path of a heads folder, two of them ("ngram+early_exit"), a loaded
            model to draft with, or a `Drafter`.
        tokenizer: for a loaded model; else the model's own.
        dtype: "auto" is fp32 on CPU and bf16 on a GPU, and what it is for a loaded model; a torch dtype or its name.
        device: "auto" takes a GPU where there is one, and a loaded model where it is; a torch device or its name.
        rule: "coupled" says exactly what the target says; "typical" (Medusa's) is lossy; or an `AcceptanceRule`.
        drafter_options: keyword arguments of the drafter.
        quantization: quantizes the weights as they are loaded: "int8", "int8_dynamic", "int4", "fp8" (torchao), "nf4"
            (bitsandbytes), or a transformers quantization config. Checkpoints that are quantized already need none.
        seed: of the seeds drawn for requests that have none.
        cost_table: "auto" limits drafts to what pays by `specdec tune`, if that was run; a `CostTable`; None: no limit.
        engine_options: fields of `EngineConfig`: max_model_len, max_num_seqs, num_blocks, block_size, ….

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError: the model or the heads can't be used.
        ConfigError: an option is unknown or out of bounds.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        drafter: str | PreTrainedModel | Drafter = "auto",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        rule: str | AcceptanceRule = "coupled",
        drafter_options: Mapping[str, Any] | None = None,
        quantization: Any = None,
        seed: int | None = None,
        cost_table: CostTable | Literal["auto"] | None = "auto",
        **engine_options: Any,
    ) -> None:
        config = engine_config(engine_options, "LLM")
        loaded = load_model(model, tokenizer, dtype, device, quantization)
        self.hf_model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.encoder = Encoder(self.tokenizer, self.name)
        self.engine = build_engine(
            loaded.model,
            drafter,
            config,
            rule=rule,
            drafter_options=drafter_options,
            tokenizer=self.tokenizer,
            eos_token_ids=_eos_token_ids(loaded.model, self.tokenizer),
            num_real_tokens=_num_real_tokens(self.tokenizer),
            seed=seed,
            cost_table=cost_table,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer prompts, as many at once as the engine holds.

        Args:
            prompts: one prompt or several; a prompt is text or token ids.
            params: for all prompts, or one for each; greedy by default.

        Returns:
            One completion a prompt, in order; where a prompt asks for n, its n completions stand together.

        Raises:
            InvalidRequest: a prompt or a parameter can't be used; nothing was run. Or a request's parameters left it
                no token to choose.
            SpecdecError: the target's logits are broken, or the drafter failed.
            Exception: whatever a logits processor raised. Like the two above it ends the whole call.
        """
        many = _prompts(prompts)
        return self._run([self._encode(p) for p in many], _spread(params, len(many)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer conversations through the model's chat template.

        Args:
            messages: one conversation or several; a conversation is a list of {"role", "content"}.
            params: as in `generate`.

        Raises:
            InvalidRequest: as in `generate`, or the model has no chat template.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        many: list[Any] = [messages] if one else list(messages)
        return self._run([self.encode_chat(m) for m in many], _spread(params, len(many)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamChunk, None, None]:
        """Answer one prompt piece by piece; closing the generator ends the request and frees its blocks.

        The request is queued when the first piece is asked for.

        Raises:
            InvalidRequest: as in `generate`, at the call; or more than one answer is asked for.
        """
        (one,) = _spread(params, 1)
        if one.n != 1:
            raise InvalidRequest(f"a stream is of one answer; n is {one.n}, use generate() for several")
        ids = self._encode(prompt)
        self.engine.check(ids, one)
        return self._stream(ids, one)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the token ids of a conversation, ready for an answer.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        return self.encoder.chat(messages)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encoder.text(prompt)
        if isinstance(prompt, (Mapping, bytes)) or not isinstance(prompt, Iterable):
            raise InvalidRequest(f"a prompt must be text or token ids, not {prompt!r:.80}")
        try:
            return [index(token) for token in prompt]  # NumPy's and torch's integers too
        except TypeError as error:
            raise InvalidRequest(f"a prompt must be text or whole token ids: {error}") from error

    def _run(self, prompts: list[list[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                requests += self.engine.add_answers(prompt, p)
            left = set(requests)
            while left and self.engine.has_work:  # else they were ended by somebody else
                for request in self.engine.step():
                    if request in left:
                        request.check()
                        left.remove(request)
        finally:
            for request in requests:
                self.engine.abort(request)
        return [r.completion() for r in requests]

    def _stream(self, prompt: list[int], params: SamplingParams) -> Generator[StreamChunk, None, None]:
        yield from self.follow(self.engine.add(prompt, params))

    def follow(self, request: Request) -> Generator[StreamChunk, None, None]:
        """Run the engine and yield what it adds to a request, until the request ends.

        Steps that others run add to it too: what they added comes with the next chunk.

        Raises:
            Exception: what ended the request, if it failed; after the last chunk.
        """
        tokens = chars = 0
        ended = False
        try:
            while not ended:
                if request.finish_reason is None and request.num_output == tokens:
                    self.engine.step()
                ended = request.finish_reason is not None
                if ended or request.num_output > tokens:
                    output = request.tokens[request.prompt_len + tokens :]
                    text, proposers = request.text[chars:], request.proposers[tokens:]
                    tokens, chars = request.num_output, len(request.text)
                    yield StreamChunk(text, output, proposers, request.finish_reason)
            request.check()
        finally:
            self.engine.abort(request)


def resolve_device(device: str | torch.device) -> torch.device:
    """Turn "auto" or a name into a device.

    Raises:
        ConfigError: the name is unknown, or the device is not there or not the one that kernels run on.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is unknown; use auto, cpu or cuda") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU; use device='cpu' or 'auto'")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    if (why := why_not_on(resolved)) is not None:
        raise ConfigError(why)
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Turn "auto" or a name into a dtype: fp32 on a CPU, bf16 on a GPU.

    Raises:
        ConfigError: it is none that models are computed in.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype {dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    return resolved


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    device: str | torch.device,
    quantization: Any,
) -> Loaded:
    """Open a model where and as it shall run; the arguments are those of `LLM`."""
    if isinstance(model, PreTrainedModel):
        where = model.device if device == "auto" else resolve_device(device)
        what = model.dtype if dtype == "auto" else resolve_dtype(dtype, where)
    else:
        where = resolve_device(device)
        what = resolve_dtype(dtype, where)
    if isinstance(quantization, str):
        quantization = quantization_config(quantization, what, where)
    return load(model, dtype=what, device=where, tokenizer=tokenizer, quantization=quantization)


def _prompts(prompts: Any) -> list[Any]:
    """Several prompts as a list; one prompt, text or token ids, as a list of one."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    many = list(prompts)
    is_ids = bool(many) and (isinstance(many[0], Number) or getattr(many[0], "ndim", None) == 0)
    return [many] if is_ids else many


def _spread(params: Any, count: int) -> list[SamplingParams]:
    """Parameters for each of so many prompts."""
    if params is None:
        params = SamplingParams()
    spread = list(params) if isinstance(params, Sequence) else [params] * count
    if len(spread) != count:
        raise InvalidRequest(f"{len(spread)} SamplingParams were given for {count} prompts; give one, or one for each")
    for p in spread:
        if not isinstance(p, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, not {p!r:.80}")
    return spread


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]


def _num_real_tokens(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Ids from here on pad the vocabulary: no token of the tokenizer has them. None where that isn't known."""
    if tokenizer is None:
        return None
    return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
