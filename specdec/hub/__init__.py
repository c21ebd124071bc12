"""Models: those that `specdec pull` fetches by name, local folders, and the hub. Layer 3: no drafter, no engine.

`known` lists the models that can be fetched, `download` gets and checks their files, `convert` makes ordinary Hugging
Face folders of them, `fetch` keeps those (`pull`). `load` opens any model; `checks` says which may be opened.
The names below are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.hub.fetch import model_folder, pull
    from specdec.hub.known import KNOWN_MODELS

_LAZY = {"KNOWN_MODELS": "specdec.hub.known", "model_folder": "specdec.hub.fetch", "pull": "specdec.hub.fetch"}

__all__ = ["KNOWN_MODELS", "model_folder", "pull"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'specdec.hub' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
