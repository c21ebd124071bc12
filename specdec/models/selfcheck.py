"""Compares a model that runs packed with the same model as it is, so that none is wrong in silence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specdec.cache.pages import KVLayout, KVPages
from specdec.errors import UnsupportedModel
from specdec.kernels.attention import AttentionMetadata
from specdec.models.batch import Batch

PROMPT = 7
BRANCH = 2
BLOCK = 16

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


class PackedModel(Protocol):
    """What is checked."""

    device: torch.device
    dtype: torch.dtype
    kv_layout: KVLayout

    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        """Run a batch: [N, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: [R, hidden_size] → [R, vocab_size]."""
        ...


def random_prompts(model: PreTrainedModel) -> torch.Tensor:
    """Three sequences, [3, PROMPT + BRANCH] int64: the first two differ in the last BRANCH tokens only.

    The third holds the padding token, which must count like any other.
    """
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (3, PROMPT + BRANCH), generator=torch.Generator().manual_seed(0))
    ids[1, :PROMPT] = ids[0, :PROMPT]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if padding is not None and 0 <= padding < size:
        ids[2, PROMPT // 2] = padding
    return ids.to(model.device)


@torch.inference_mode()
def check_packed(packed: PackedModel, model: PreTrainedModel, prompts: torch.Tensor) -> None:
    """Run two sequences in one batch: one whole and then as a tree of two branches, the other token by token.

    Args:
        packed: the model as it runs packed.
        model: the same model as it is.
        prompts: from `random_prompts`.

    Raises:
        UnsupportedModel: some logits differ; the message says where and by how much.
    """
    first, second, other = model(input_ids=prompts, use_cache=False).logits
    branches = torch.cat([first[PROMPT - 1 :], second[PROMPT:]])
    pages = KVPages(packed.kv_layout, 2, BLOCK, packed.device)
    singles = [_chunk(prompts[2, i : i + 1], i, block=1) for i in range(PROMPT + BRANCH)]

    def run(*parts: _Rows) -> torch.Tensor:
        return packed.logits(packed.forward(_pack(parts, prompts.device), pages))

    whole = run(_chunk(prompts[0, : PROMPT - 1], 0, block=0), singles[0])
    middle = [run(part) for part in singles[1:-1]]
    tree = run(_tree(prompts, block=0), singles[-1])
    _compare("a whole prompt", model, packed.dtype, whole[:-1], first[: PROMPT - 1])
    _compare("a tree of two branches", model, packed.dtype, tree[:-1], branches)
    _compare("token by token", model, packed.dtype, torch.cat([whole[-1:], *middle, tree[-1:]]), other)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one sequence, whose keys lie in one block; the fields are those of `AttentionMetadata`."""

    ids: torch.Tensor
    positions: list[int]
    visible: list[int]
    ancestors: list[int]
    context: int
    start: int
    block: int


def _chunk(ids: torch.Tensor, start: int, block: int) -> _Rows:
    end = start + len(ids)
    return _Rows(ids, [*range(start, end)], [*range(start + 1, end + 1)], [0] * len(ids), end, start, block)


def _tree(prompts: torch.Tensor, block: int) -> _Rows:
    """The first prompt's last token as the root, and a branch for each of the two ways to go on."""
    context, depths = PROMPT - 1, range(1, BRANCH + 1)
    chain = [(2 << depth) - 2 for depth in depths]  # the first branch's own bits
    ancestors = [1, *(bits | 1 for bits in chain), *(bits << BRANCH | 1 for bits in chain)]
    positions = [context + depth for depth in (0, *depths, *depths)]
    ids = torch.cat([prompts[0, context:], prompts[1, PROMPT:]])
    return _Rows(ids, positions, [context] * len(ids), ancestors, context, context, block)


def _pack(parts: Sequence[_Rows], device: torch.device) -> Batch:
    slots = [part.block * BLOCK + part.start + i for part in parts for i in range(len(part.ids))]
    per_row = [[x for part in parts for x in getattr(part, name)] for name in ("positions", "visible", "ancestors")]
    positions, visible, ancestors = torch.tensor(per_row, device=device)
    attention = AttentionMetadata(
        cu_seqlens_q=(0, *accumulate(len(part.ids) for part in parts)),
        context_lens=tuple(part.context for part in parts),
        seq_lens=tuple(part.start + len(part.ids) for part in parts),
        block_table=torch.tensor([[part.block] for part in parts], device=device),
        positions=positions,
        visible=visible,
        ancestors=ancestors,
        block_size=BLOCK,
    )
    return Batch(torch.cat([part.ids for part in parts]), torch.tensor(slots, device=device), attention)


def _compare(what: str, model: PreTrainedModel, dtype: torch.dtype, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare rows of logits by their relative error; in 16 bits, where an expert may tip over, by the median row."""
    got, want = got.double(), want.double()
    errors = (got - want).norm(dim=-1) / (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    error = float(errors.max() if dtype.itemsize >= 4 else errors.median())
    if not error <= _TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"{what}, its logits differ from its own forward's (attention {model.config._attn_implementation!r}) by "
            f"{error:.2g} of their size, more than {_TOLERANCE[dtype]:g}, the limit in {dtype}: "
            "it does something that specdec's attention doesn't see"
        )
