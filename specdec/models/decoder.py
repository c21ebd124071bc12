"""One decoder for the packed batch, over the weights of a loaded Hugging Face model."""

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedModel

from specdec.cache.pages import KVLayout, KVPages
from specdec.kernels.activation import act_mul
from specdec.kernels.attention import tree_attention
from specdec.kernels.linear import linear
from specdec.kernels.norm import add_rmsnorm, rmsnorm
from specdec.kernels.rope import rope_write
from specdec.models.batch import Batch
from specdec.models.rope import Rotary
from specdec.models.weights import DecoderWeights, LayerWeights, share_weights


class Decoder:
    """Runs a Hugging Face causal LM over packed batches. Its weights are the model's own, not copies.

    Args:
        model: a loaded model of a known family, in eval mode. Its projections become views of merged matrices;
            it still works by itself.

    Raises:
        UnsupportedModel: the family, or a feature of its config, is not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights: DecoderWeights = share_weights(model)
        config = model.config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.weights.head.shape[0]
        self.max_len: int = _max_len(config.max_position_embeddings, self.weights.rotary)
        self.device: torch.device = self.weights.embed.device
        self.dtype: torch.dtype = self.weights.embed.dtype
        w = self.weights
        self.kv_layout = KVLayout(len(w.layers), w.num_kv_heads, w.head_dim, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        """Run the rows of a batch; their keys and values go to their slots.

        Returns:
            [N, hidden_size], after the last norm.
        """
        w = self.weights
        ropes = [rotary.cos_sin(batch.attention.positions, self.dtype) for rotary in w.rotary]
        residual = F.embedding(batch.input_ids, w.embed)
        if w.embed_scale is not None:
            residual = residual * w.embed_scale
        x = rmsnorm(residual, w.layers[0].attn_norm, w.eps)
        for i, layer in enumerate(w.layers):
            x = self._attention(layer, i, x, ropes[layer.rotary], batch, pages)
            if layer.post_attn_norm is not None:
                x = rmsnorm(x, layer.post_attn_norm, w.eps)
            x, residual = add_rmsnorm(x, residual, layer.mlp_norm, w.eps)
            x = linear(act_mul(linear(x, layer.gate_up, layer.gate_up_bias), w.activation), layer.down, layer.down_bias)
            if layer.post_mlp_norm is not None:
                x = rmsnorm(x, layer.post_mlp_norm, w.eps)
            next_norm = w.layers[i + 1].attn_norm if i + 1 < len(w.layers) else w.norm
            x, residual = add_rmsnorm(x, residual, next_norm, w.eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: [R, hidden_size] → [R, vocab_size]."""
        logits, cap = linear(hidden, self.weights.head, self.weights.head_bias), self.weights.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attention(
        self,
        layer: LayerWeights,
        i: int,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        pages: KVPages,
    ) -> torch.Tensor:
        w = self.weights
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, w.head_dim)  # [N, heads + 2 kv heads, D]
        if layer.qk_norm is not None:
            qk = qkv[:, : w.num_heads + w.num_kv_heads]
            qk.copy_(rmsnorm(qk, layer.qk_norm, w.eps))
        q = rope_write(qkv, *rope, pages.k[i], pages.v[i], batch.slot_mapping, w.num_heads)
        o = tree_attention(
            q,
            pages.k[i],
            pages.v[i],
            batch.attention,
            scale=w.scale,
            window=layer.window,
            softcap=w.score_softcap,
        )
        return linear(o.flatten(1), layer.o, layer.o_bias)


def _max_len(max_position_embeddings: int, rotary: tuple[Rotary, ...]) -> int:
    """The longest sequence: where frequencies change with the length, up to there (specdec.models.rope says why)."""
    return min([max_position_embeddings, *(r.original_len for r in rotary if r.original_len is not None)])
