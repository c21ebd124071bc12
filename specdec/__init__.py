"""Speculative decoding for Hugging Face causal LMs: several tokens per forward pass, the same output.

The public names below are imported on first use, so that `import specdec` alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.errors import SpecdecError
    from specdec.hf.accelerate import accelerate, restore
    from specdec.llm import LLM
    from specdec.outputs import Completion, StreamChunk
    from specdec.params import SamplingParams

__version__ = "0.1.0"

_LAZY = {
    "LLM": "specdec.llm",
    "SamplingParams": "specdec.params",
    "Completion": "specdec.outputs",
    "StreamChunk": "specdec.outputs",
    "SpecdecError": "specdec.errors",
    "accelerate": "specdec.hf.accelerate",
    "restore": "specdec.hf.accelerate",
}

__all__ = [
    "LLM",
    "Completion",
    "SamplingParams",
    "SpecdecError",
    "StreamChunk",
    "__version__",
    "accelerate",
    "restore",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
