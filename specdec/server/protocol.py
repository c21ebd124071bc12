"""The objects that clients send. Whatever isn't named here or in `fields` is refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from specdec.params import MAX_LOGPROBS, MAX_SAMPLES, MAX_SPECULATIVE_TOKENS, MAX_STOPS, MAX_TOKEN_IDS
from specdec.server.fields import without_foreign_fields

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_STOP_CHARS = 1000
_INT32, _INT64 = 2**31 - 1, 2**63 - 1

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32)]], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """No field may be unknown, no value is converted; null is as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        return without_foreign_fields(data)


class StreamOptions(Strict):
    """How a stream ends; `include_obfuscation` has no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SpeculationOptions(Strict):
    """How this request is drafted for; none of it changes the answer. `trace` says who proposed each token."""

    enabled: bool = True
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=MAX_SPECULATIVE_TOKENS)
    trace: bool = False


class SamplingRequest(Strict):
    """What both kinds of completion take; the last nine fields are not OpenAI's."""

    model: str = Field(max_length=500)
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1, le=_INT32)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    stop: StopString | StopStrings = Field(default_factory=list)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MAX_TOKEN_IDS)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)

    top_k: int = Field(0, ge=-1, le=_INT32)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0, le=_INT32)
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = Field(0, ge=0, le=_INT32)  # one can only go behind others, not before
    speculation: SpeculationOptions = Field(default_factory=SpeculationOptions)

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        if not all(key.isdecimal() and len(key) < 10 for key in bias):
            raise ValueError("the keys must be token ids")
        return bias

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if not self.stream and "stream_options" in self.model_fields_set:
            raise PydanticCustomError(
                "of_streams", "stream_options needs stream to be true", {"param": "stream_options"}
            )
        return self


class TextPart(Strict):
    """A part of a message's content; text is the only kind that this server knows."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    name: str | None = Field(None, max_length=500)

    def as_dict(self) -> dict[str, str]:
        """Return the message as chat templates take it; they know no developers."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "of_logprobs", "top_logprobs needs logprobs to be true", {"param": "top_logprobs"}
            )
        if None not in (both := {self.max_tokens, self.max_completion_tokens}) and len(both) == 2:
            text = "max_tokens and max_completion_tokens differ; give one of them"
            raise PydanticCustomError("two_limits", text, {"param": "max_tokens"})
        return self


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or several."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class TokenizeRequest(Strict):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = Field(None, max_length=500)
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = Field(None, max_length=500)
    tokens: TokenIds
