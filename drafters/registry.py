"""Drafters by name. Importing this imports none of those that need weights."""

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from transformers import PreTrainedModel

from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.protocol import Drafter, DraftsOnDevice, DraftTarget
from specdec.errors import ConfigError

Factory = Callable[..., Drafter]


def _lazy(module: str, name: str) -> Callable[[], Factory]:
    def load() -> Factory:
        factory: Factory = getattr(import_module(module), name)
        return factory

    return load


DRAFTERS: dict[str, Callable[[], Factory]] = {
    "auto": _lazy("specdec.drafters.shipped", "auto"),
    "none": _lazy("specdec.drafters.none", "NoDrafter"),
    "ngram": _lazy("specdec.drafters.ngram", "NGramDrafter"),
    "medusa": _lazy("specdec.drafters.medusa", "load_medusa"),
    "hydra": _lazy("specdec.drafters.hydra", "load_hydra"),
    "recurrent": _lazy("specdec.drafters.recurrent", "load_recurrent"),
    "shipped": _lazy("specdec.drafters.shipped", "load_shipped"),
    "draft_model": _lazy("specdec.drafters.models", "load_draft_model"),
    "early_exit": _lazy("specdec.drafters.models", "early_exit"),
}
"""Name -> what imports the drafter and returns its factory. A factory's keyword arguments are the drafter's options,
apart from `target`, which it gets if it has it."""


def make_drafter(
    spec: str | Path | PreTrainedModel | Drafter, target: DraftTarget | None = None, **options: Any
) -> Drafter:
    """Return the drafter that a user asked for.

    Args:
        spec: a name ("none", "ngram", "shipped", or "auto": n-grams, then shipped heads if there are any), a name and
            the path of its weights ("medusa:PATH", "draft_model:PATH"; without a path "medusa" takes the shipped heads
            of whatever kind, as `specdec train medusa` makes all kinds), the path of a folder of heads, two of these
            ("ngram+medusa:PATH": the first where it drafts, else the second), a loaded Hugging Face model, or a
            drafter, which is returned as it is.
        target: the model to draft for; the drafters without weights need none.
        options: the drafter's own options.

    Raises:
        ConfigError: the name or an option is unknown, or one is missing or out of bounds.
        CheckpointError: the drafter's weights can't be read or belong to another model.
    """
    if not isinstance(spec, (str, Path, PreTrainedModel)):
        return _checked(spec, options)
    factory, given = _named(spec, options)
    wanted = inspect.signature(factory).parameters.get("target")
    if wanted is None:
        return factory(**given)
    if target is None and wanted.default is wanted.empty:
        raise ConfigError("the drafter works with its target's weights or hidden states; pass the target")
    return factory(target=target, **given)


def check_drafter(spec: str | Path | PreTrainedModel | Drafter, **options: Any) -> None:
    """Check what a user asked for as far as that takes neither a target nor weights: the name and the options' names.

    Args:
        spec, options: as for `make_drafter`.

    Raises:
        ConfigError: the name or an option is unknown, or one is missing.
    """
    if isinstance(spec, (str, Path, PreTrainedModel)):
        _named(spec, options)
    else:
        _checked(spec, options)


def drafts_on_device(name: str) -> bool:
    """Return whether drafters of that name have what `DraftsOnDevice` asks for; nothing is made or loaded.

    Args:
        name: one of `DRAFTERS`, or two of them, as in "ngram+early_exit".
    """
    first, plus, second = name.partition("+")
    if plus:
        from specdec.drafters.heads_drafter import HeadsDrafter

        return first == "ngram" and issubclass(_kind(second), HeadsDrafter)
    return isinstance(_kind(name), DraftsOnDevice)  # the class itself has all members that its drafters have


def _kind(name: str) -> type:
    """What a drafter of that name is at least."""
    factory: Any = DRAFTERS[name]()
    kind: type = factory if isinstance(factory, type) else get_type_hints(factory)["return"]
    return kind


def _named(spec: str | Path | PreTrainedModel, options: dict[str, Any]) -> tuple[Factory, dict[str, Any]]:
    """The factory of a drafter that is to be made, and its arguments besides the target."""
    if isinstance(spec, PreTrainedModel):
        spec, options = "draft_model", {"path": spec, **options}
    if (pair := _pair(str(spec))) is not None:
        for part in pair:
            _named(part, {})
        _check_options(str(spec), options, ["both"])
        return partial(_both, *pair), options
    name, path = _split(spec)
    if path is not None:
        options = {"path": path, **options}
    factory = DRAFTERS[name]()
    accepted = {option: p for option, p in inspect.signature(factory).parameters.items() if option != "target"}
    _check_options(name, options, list(accepted))
    missing = [p.name for p in accepted.values() if p.default is p.empty and p.name not in options]
    if missing == ["path"] and name in ("medusa", "hydra", "recurrent"):
        _check_options(f"{name} without a path", options, ["tree", "max_nodes"])
        return partial(import_module("specdec.drafters.shipped").load_shipped_of, name), options
    if missing:
        hint = f': write "{name}:PATH"' if missing == ["path"] else ""
        raise ConfigError(f"drafter {name!r} needs {', '.join(missing)}{hint}")
    return factory, options


def _pair(spec: str) -> tuple[str, str] | None:
    """The two drafters that a spec names; None if it is one, in whose path there may be a + as well."""
    name, _, path = spec.partition(":")
    if name in DRAFTERS and path and Path(path).exists():
        return None
    first, plus, second = spec.partition("+")
    return (first, second) if plus and first.partition(":")[0] in DRAFTERS else None


def _both(first: str, second: str, target: DraftTarget | None = None, both: bool = False) -> Drafter:
    from specdec.drafters.heads_drafter import HeadsDrafter
    from specdec.drafters.ngram import NGramDrafter
    from specdec.drafters.ngram_heads import NGramHeadsDrafter

    one, other = make_drafter(first, target), make_drafter(second, target)
    if isinstance(one, NGramDrafter) and isinstance(other, HeadsDrafter) and not both:  # no kernel merges trees
        return NGramHeadsDrafter(one, other)
    return HybridDrafter(one, other, both)


def _split(spec: str | Path) -> tuple[str, str | None]:
    """The drafter's name, and the path of its weights if one is given."""
    text = str(spec)
    name, colon, path = text.partition(":")
    if isinstance(spec, str) and name in DRAFTERS:
        if colon and not path:
            raise ConfigError(f"drafter {text!r} has no path after the colon")
        return name, path or None
    if isinstance(spec, Path) or "/" in text or (text and Path(text).exists()):
        from specdec.drafters.heads import heads_kind  # here, for importing this module imports no heads

        return heads_kind(text), text
    close = difflib.get_close_matches(name, DRAFTERS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    known = f"{', '.join(DRAFTERS)}, medusa:PATH, hydra:PATH, recurrent:PATH, draft_model:PATH, ngram+…, or a path"
    raise ConfigError(f"unknown drafter {text!r}{hint}; known: {known}")


def _check_options(name: str, options: dict[str, Any], accepted: list[str]) -> None:
    for option in options:
        if option not in accepted:
            close = difflib.get_close_matches(option, accepted, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            known = ", ".join(accepted) or "none"
            raise ConfigError(f"drafter {name!r} has no option {option!r}{hint}; it accepts: {known}")


def _checked(drafter: Drafter, options: dict[str, Any]) -> Drafter:
    lacks = [a for a in ("name", "reads_hidden", "propose", "observe", "forget") if not hasattr(drafter, a)]
    if isinstance(drafter, type):
        raise ConfigError(f"{drafter!r} is a class; give a drafter that was made of it, or a name")
    if lacks:
        raise ConfigError(f"{drafter!r} is neither a drafter's name nor a drafter: it lacks {', '.join(lacks)}")
    if options:
        raise ConfigError(f"options {', '.join(options)} can't be given to a drafter that is already made")
    return drafter
