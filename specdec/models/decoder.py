"""One decoder for the packed batch, over the weights of a loaded Hugging Face model."""

from copy import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from specdec.cache.pages import KVLayout, KVPages
from specdec.kernels.ops import Ops, choose_ops
from specdec.models.batch import Batch
from specdec.models.rope import Rotary
from specdec.models.support import quantized_by
from specdec.models.weights import DecoderWeights, LayerWeights, Projection, prepack_weights, share_weights


class Decoder:
    """Runs a Hugging Face causal LM over packed batches, over its own weights and few copies; see `refresh`.

    Args:
        model: a loaded model of a known family, in eval mode. Its projections become views of merged matrices;
            it still works by itself.
        ops: the kernels; None chooses by device and dtype.
        prepacked: take copies of the matrices in the order in which products read them, but for those that don't gain
            by it; only where `can_prepack` says so. The attribute says whether there are such copies.

    Raises:
        UnsupportedModel: the family, or a feature of its config, is not known.
    """

    def __init__(self, model: PreTrainedModel, ops: Ops | None = None, *, prepacked: bool = False) -> None:
        shared = share_weights(model)
        self.weights: DecoderWeights = prepack_weights(shared) if prepacked else shared
        self.prepacked = len(self.weights.copies) > len(shared.copies)
        self.head = shared.head  # as the model has it, whatever it is multiplied by
        self.quantized_by = quantized_by(model)
        config = model.config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.weights.head.shape[0]
        self.max_len: int = _max_len(config.max_position_embeddings, self.weights.rotary)
        self.device: torch.device = self.weights.embed.device
        self.dtype: torch.dtype = self.weights.embed.dtype
        w = self.weights
        self.kv_layout = KVLayout(len(w.layers), w.num_kv_heads, w.head_dim, self.dtype)
        self.ops = ops or choose_ops(self.device, self.dtype)
        self._angles = _tables(w.rotary, self.max_len, self.dtype) if self.device.type == "cuda" else None

    def first_layers(self, num_layers: int) -> "Decoder":
        """Return a decoder of the first layers, the last norm and the head, on the same weights.

        Its keys and values are those of the same layers of the whole decoder, so it can run over the same pages.
        """
        part = copy(self)
        part.weights = replace(self.weights, layers=self.weights.layers[:num_layers])
        part.kv_layout = replace(self.kv_layout, num_layers=num_layers)
        return part

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow the model's parameters after they were updated in place; some are copies."""
        for copy_of, make in self.weights.copies:
            copy_of.copy_(make())

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        """Run the rows of a batch; their keys and values go to their slots.

        Returns:
            [N, hidden_size], after the last norm.
        """
        w, ops = self.weights, self.ops
        batch = replace(batch, attention=batch.attention.anew())  # a captured forward's is filled again and again
        ropes = self._ropes(batch.attention.positions)
        residual = w.embed[batch.input_ids]
        if w.embed_scale is not None:
            residual = residual * w.embed_scale
        x = ops.rmsnorm(residual, w.layers[0].attn_norm, w.eps)
        for i, layer in enumerate(w.layers):
            x = self._attention(layer, i, x, ropes[layer.rotary], batch, pages)
            if layer.post_attn_norm is not None:
                x = ops.rmsnorm(x, layer.post_attn_norm, w.eps)
            x, residual = ops.add_rmsnorm(x, residual, layer.mlp_norm, w.eps)
            x = self._project(self._gated(x, layer), layer.down, layer.down_bias)
            if layer.post_mlp_norm is not None:
                x = ops.rmsnorm(x, layer.post_mlp_norm, w.eps)
            next_norm = w.layers[i + 1].attn_norm if i + 1 < len(w.layers) else w.norm
            x, residual = ops.add_rmsnorm(x, residual, next_norm, w.eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: [R, hidden_size] → [R, vocab_size]."""
        logits, cap = self.ops.linear(hidden, self.weights.head, self.weights.head_bias), self.weights.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _ropes(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cos and sin [N, R] of each kind of rotation."""
        if self._angles is None:
            return [rotary.cos_sin(positions, self.dtype) for rotary in self.weights.rotary]
        # A node behind the last position is never emitted, and what is before the first is padding.
        within = positions.clamp(0, len(self._angles[0][0]) - 1)
        return [(cos[within], sin[within]) for cos, sin in self._angles]

    def _attention(
        self,
        layer: LayerWeights,
        i: int,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        pages: KVPages,
    ) -> torch.Tensor:
        w, ops = self.weights, self.ops
        qkv = self._project(x, layer.qkv, layer.qkv_bias).view(len(x), -1, w.head_dim)  # [N, heads + 2 kv heads, D]
        if layer.qk_norm is not None:
            qk = qkv[:, : w.num_heads + w.num_kv_heads]
            qk.copy_(ops.rmsnorm(qk, layer.qk_norm, w.eps))
        q = ops.rope_write(qkv, *rope, pages.k[i], pages.v[i], batch.slot_mapping, w.num_heads)
        o = ops.tree_attention(
            q,
            pages.k[i],
            pages.v[i],
            batch.attention,
            scale=w.scale,
            window=layer.window,
            softcap=w.score_softcap,
        )
        return self._project(o.flatten(1), layer.o, layer.o_bias)

    def _project(self, x: torch.Tensor, weight: Projection, bias: torch.Tensor | None) -> torch.Tensor:
        """[N, in] → [N, out], by a matrix or by quantized modules."""
        if isinstance(weight, torch.Tensor):
            return self.ops.linear(x, weight, bias)
        return torch.cat([module(x) for module in weight], dim=-1)

    def _gated(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """activation(gate) · up: [N, hidden_size] → [N, I]."""
        activation = self.weights.activation
        if isinstance(layer.gate_up, torch.Tensor):
            return self.ops.gated_linear(x, layer.gate_up, layer.gate_up_bias, activation)
        return self.ops.act_mul(self._project(x, layer.gate_up, None), activation)


def _max_len(max_position_embeddings: int, rotary: tuple[Rotary, ...]) -> int:
    """The longest sequence: where frequencies change with the length, up to there (specdec.models.rope says why)."""
    return min([max_position_embeddings, *(r.original_len for r in rotary if r.original_len is not None)])


def _tables(rotary: tuple[Rotary, ...], max_len: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cos and sin [max_len, R] of each kind of rotation: on a GPU a lookup costs less than the angles do."""
    return [r.cos_sin(torch.arange(max_len, device=r.inv_freq.device), dtype) for r in rotary]
