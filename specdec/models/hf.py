"""Any causal LM of transformers over packed batches: its own forward with our attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.cache.pages import KVLayout, KVPages
from specdec.errors import UnsupportedModel
from specdec.kernels.formats import spreads
from specdec.kernels.ops import Ops, choose_ops
from specdec.models.batch import Batch
from specdec.models.interface import PACKED, answering, configs_of, refuse_options
from specdec.models.selfcheck import check_packed, random_prompts
from specdec.models.survey import AttentionLayer, refuse_by_config, survey


class HFModel:
    """Runs a Hugging Face causal LM that the `Decoder` doesn't know over packed batches.

    The model's own forward runs, and only its attention is replaced, for the length of each call; between the calls
    the model is as it was. A random prompt is compared with the model's own answer first, so a model is refused
    rather than run wrong.

    Args:
        model: a loaded model in eval mode whose attention goes through transformers' `AttentionInterface`.

    Raises:
        UnsupportedModel: it can't be run, or the comparison fails; the message says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.prepacked = False
        self._configs = configs_of(model)
        self.device: torch.device = model.device
        try:
            self._learn_and_check()
        except Exception as error:  # models that weren't made for this fail in ways of their own
            name = f"{type(model).__name__} (model type {model.config.model_type!r})"
            raise UnsupportedModel(f"{name} can't be run: {error}") from error

    def _learn_and_check(self) -> None:
        refuse_by_config(self._model)
        prompts = random_prompts(self._model)
        found = survey(self._model, prompts[0])
        self._body, self._wrap, self._layers = found.body, found.wrap, found.layers
        self.hidden_size, self.vocab_size, self.dtype = found.hidden_size, found.vocab_size, found.dtype
        self.max_len: int = max_positions(self._model.config.get_text_config())
        first = found.layers[0]
        head_dim = max(first.k_dim, first.v_dim)
        self.kv_layout = KVLayout(len(found.layers), first.num_kv_heads, head_dim, first.dtype)
        self.ops = choose_ops(self.device, first.dtype)
        check_packed(self, self._model, prompts)

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        """Run the rows of a batch; their keys and values go to their slots.

        Returns:
            [N, hidden_size], what the model's head scores.
        """
        answers = {
            layer.module: PagedAttention(i, layer, batch, pages, self.ops) for i, layer in enumerate(self._layers)
        }
        # A node behind the last position is never emitted; a table of positions has no row for it.
        positions = batch.attention.positions.clamp(max=self.max_len - 1)[None]
        with answering(self._configs, PACKED, answers):
            output = self._body(input_ids=batch.input_ids[None], position_ids=positions, use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: [R, hidden_size] → [R, vocab_size].

        The model's own forward does it, on top of a body that returns `hidden`: so a head's scale, softcap or bias
        are the model's, whatever they are.
        """
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
        with _forward_of(self._body, lambda *_, **__: self._wrap(hidden[None])):
            scores: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return scores


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Answers one attention module in one step: writes its keys and values to the pages, and attends to them.

    Args:
        index: of the layer in the pages.
        layer: what the survey found.
        batch: the step.
        pages: keys and values of all layers.
        ops: the kernels.
    """

    index: int
    layer: AttentionLayer
    batch: Batch
    pages: KVPages
    ops: Ops

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend: query [1, heads, N, D], key and value [1, kv heads, N, D] → [1, N, heads, D].

        Raises:
            UnsupportedModel: the call asks for what the survey didn't see, e.g. dropout.
        """
        refuse_options(module, dropout, is_causal, options)
        if mask is not None:
            raise UnsupportedModel(f"{type(module).__name__} gets a mask of the model's own making")
        width = self.pages.layout.head_dim
        q, k, v = (F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1])) for x in (query, key, value))  # [N, heads, D]
        k_pages, v_pages = self.pages.k[self.index], self.pages.v[self.index]
        if spreads(k_pages):
            q, k = self.ops.spread(q), self.ops.spread(k)
        self.ops.kv_write(k, v, k_pages, v_pages, self.batch.slot_mapping)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = self.ops.tree_attention(
            q.contiguous(),
            k_pages,
            v_pages,
            self.batch.attention,
            scale=scale,
            window=self.layer.window,
            softcap=softcap,
        )
        return out[None, ..., : self.layer.v_dim]


def max_positions(config: PreTrainedConfig) -> int:
    """Most tokens of one sequence: the position table's length, or as far as rotary angles stay the same.

    Raises:
        UnsupportedModel: the config doesn't say.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None or longest < 1:
        raise UnsupportedModel(f"its config says max_position_embeddings={longest}, not how many positions it has")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if part.get("rope_type") == "longrope":  # beyond this, the angles of all tokens of a batch would change
            longest = min(longest, part["original_max_position_embeddings"])
    return longest


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward for a moment."""
    attributes = vars(module)
    own = attributes.get("forward")  # accelerate's hooks set one
    attributes["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own
