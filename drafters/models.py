"""Makes the drafters that run a model: loads it, checks that it speaks the target's tokens."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.protocol import DraftTarget
from specdec.errors import ConfigError
from specdec.hub.load import load
from specdec.models.decoder import Decoder
from specdec.models.load import make_target
from specdec.verifier.tree import MAX_NODES


def load_draft_model(
    target: DraftTarget,
    path: str | Path | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_speculative_tokens: int = 4,
    widths: Sequence[int] | None = None,
) -> DraftModelDrafter:
    """Draft with another causal LM that has the target's tokenizer.

    Args:
        target: the model to draft for.
        path: the draft model: a folder, a hub id, a known name, or a loaded model.
        tokenizer: of a loaded model; without one only the vocabularies' sizes are compared.
        num_speculative_tokens: length of the drafted chain.
        widths: nodes to keep at each depth, for a tree instead of a chain.

    Raises:
        ConfigError: the vocabularies differ by more than padding, or an option is out of bounds.
        ModelNotFound, UnsupportedModel, CheckpointError: the model can't be used.
    """
    loaded = load(path, dtype=target.dtype, device=target.device, tokenizer=tokenizer)
    model = make_target(loaded.model, prepack=None)
    _check_vocabulary(target, loaded.tokenizer, model.vocab_size, loaded.name)
    return DraftModelDrafter(model, target.vocab_size, _widths(num_speculative_tokens, widths))


def early_exit(
    target: DraftTarget,
    *,
    num_layers: int | None = None,
    num_speculative_tokens: int = 4,
    widths: Sequence[int] | None = None,
) -> DraftModelDrafter:
    """Draft with the target's own first layers, its last norm and its head; they share the target's keys and values.

    Args:
        target: the model to draft for; it must run in our decoder.
        num_layers: how many layers; a quarter of them by default.
        num_speculative_tokens: length of the drafted chain.
        widths: nodes to keep at each depth, for a tree instead of a chain.

    Raises:
        ConfigError: the target's layers can't be run apart, or an option is out of bounds.
    """
    if not isinstance(target.model, Decoder):
        raise ConfigError("drafter 'early_exit' needs a target whose layers our decoder runs; choose another drafter")
    total = target.model.kv_layout.num_layers
    num_layers = max(1, total // 4) if num_layers is None else num_layers
    if type(num_layers) is not int or not 1 <= num_layers < total:
        raise ConfigError(f"num_layers must be from 1 to {total - 1}, fewer than the target's, not {num_layers!r}")
    part = target.model.first_layers(num_layers)
    chosen = _widths(num_speculative_tokens, widths)
    return DraftModelDrafter(part, target.vocab_size, chosen, own_pages=False, name="early_exit")


def _widths(num_speculative_tokens: int, widths: Sequence[int] | None) -> Sequence[int]:
    if type(num_speculative_tokens) is not int or not 1 <= num_speculative_tokens < MAX_NODES:
        most = MAX_NODES - 1
        raise ConfigError(
            f"num_speculative_tokens must be a whole number from 1 to {most}, not {num_speculative_tokens!r}"
        )
    return (1,) * num_speculative_tokens if widths is None else widths


def _check_vocabulary(
    target: DraftTarget, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, name: str
) -> None:
    """Refuse a draft model that means other tokens by the same ids."""
    if target.tokenizer is None or tokenizer is None:
        if vocab_size != target.vocab_size:
            raise ConfigError(
                f"draft model {name!r} has {vocab_size} tokens and the target {target.vocab_size}; give both "
                "tokenizers, so that it can be seen whether they differ by padding only"
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), tokenizer.get_vocab()
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if differing:
        raise ConfigError(
            f"draft model {name!r} has another tokenizer: {len(differing)} tokens differ, {min(differing)!r} for one; "
            "draft with a model of the target's own family, or with 'ngram'"
        )
