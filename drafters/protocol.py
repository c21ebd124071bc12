"""What the engine asks of a drafter, and what it tells it. The only thing that layer 6 knows about drafters."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedTokenizerBase

from specdec.cache.blocks import BlockPool
from specdec.cache.pages import KVLayout, KVPages
from specdec.errors import ConfigError
from specdec.models.protocol import PackedModel
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """One sequence that wants a tree.

    Args:
        request_id: the engine's id of the request.
        tokens: prompt and output so far; the last one is the root. Read only.
        num_output: how many of `tokens` are output: the root's children stand at this output position.
        max_nodes: node budget, root included; 1 asks for the root alone.
        params: the request's parameters; `params.seed` is set.
        block_table: the request's blocks, with room for the root and `max_nodes` - 1 nodes behind it.
        num_computed: leading tokens whose keys and values the target has.
    """

    request_id: int
    tokens: Sequence[int]
    num_output: int
    max_nodes: int
    params: SamplingParams
    block_table: Sequence[int] = ()
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step committed, for the drafters that learn from it.

    Args:
        request_ids: the B requests of the step.
        num_committed: tokens that each request committed to the cache: prompt chunk and accepted path.
        hidden: [sum(num_committed), hidden_size] final hidden states of those tokens in order (after the last
            norm, before the head), or None if the drafter doesn't read them.
    """

    request_ids: Sequence[int]
    num_committed: Sequence[int]
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a drafter may know of the target model.

    Args:
        hidden_size: H, width of the final hidden states.
        vocab_size: V, columns of the logits, padding included.
        device: where the target's hidden states and logits are.
        dtype: their dtype.
        lm_head: maps final hidden states [R, H] to logits [R, V].
        fingerprint: the base's fingerprint, as `specdec.drafters.heads.base_fingerprint` computes it.
        model: the target itself, for drafters that run part of it.
        tokenizer: the target's, for drafters that have one of their own; None if there is none.
        embed: maps token ids [...] to the model's own input embeddings [..., H], scaled as its embedding module scales
            them; None if there is none.
        head_rows: from token ids [D] to `lm_head` for those tokens alone, [R, H] to [R, D]; None if there is none.
    """

    hidden_size: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    fingerprint: str
    model: PackedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    head_rows: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]] | None = None

    def head_for(self, token_ids: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the head for the tokens that drafts are made of.

        Args:
            token_ids: [D], a draft vocabulary; None for all tokens.

        Raises:
            ConfigError: some are wanted, and the target gives no head for them.
        """
        if token_ids is None:
            return self.lm_head
        if self.head_rows is None:
            raise ConfigError("heads with a draft vocabulary score part of it; give the DraftTarget its head_rows")
        return self.head_rows(token_ids)


@runtime_checkable
class HasMatrix(Protocol):
    """What a head has besides whose scores may be a product alone, which kernels can take apart."""

    @property
    def matrix(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Its weight [V, H] and bias [V] or None; None if its scores are more than their product."""
        ...


class Drafter(Protocol):
    """Guesses a tree of continuations for each sequence. Never changes what is emitted, only how fast."""

    name: str
    """Stands in reports and beside the tokens it proposed."""
    reads_hidden: bool
    """Whether `observe` wants the target's final hidden states."""

    def propose(self, queries: Sequence[DraftQuery]) -> TokenTree:
        """Return one tree a query, each rooted at the query's last token and within its node budget."""
        ...

    def observe(self, observation: Observation) -> None:
        """Take note of what was committed in the step."""
        ...

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop all state of requests that ended or were preempted."""
        ...


@runtime_checkable
class KnowsChances(Protocol):
    """What a drafter has besides if its trees are the first nodes of a tree that was measured."""

    @property
    def node_chances(self) -> tuple[float, ...] | None:
        """How likely each node but the root is accepted on average, in the tree's order; None if that isn't known."""
        ...


@runtime_checkable
class UsesCache(Protocol):
    """What a drafter with attention layers has besides: its keys and values stand under the engine's block tables."""

    kv_layouts: Sequence[KVLayout]
    """Of the layers that aren't the target's."""

    def attach(self, pages: KVPages, pool: BlockPool) -> None:
        """Take the target's pages; layers of its own get pages of as many blocks of the same size and format.

        A request's first blocks may come from another one, with the same tokens: what was written there before is
        valid while the pool's version of a block stays (`specdec.cache.filled.FilledBlocks`).
        """
        ...


@dataclass(frozen=True, slots=True)
class DeviceQuery:
    """Sequences that want trees of a captured step. Tensors on the device, whose values the host doesn't know.

    Args:
        history: [S, L] int32, tokens of each sequence.
        lengths: [S] int64, tokens known; the last one is the root. 0: the sequence is inactive.
        prompt_lens: [S] int64; the root's children stand at output position lengths - prompt_lens.
        seeds: [S] int64.
        temperature: [S] float32; 0 is greedy.
        hidden: [S, H] final hidden state of the token before the root; H is 0 unless the drafter is `KeepsHidden`.
        has_hidden: [S] bool, whether it is known.
    """

    history: torch.Tensor
    lengths: torch.Tensor
    prompt_lens: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    hidden: torch.Tensor
    has_hidden: torch.Tensor

    def roots(self) -> torch.Tensor:
        """Return the last token of each sequence, [S, 1] int64; any token of inactive ones."""
        return self.history.gather(1, (self.lengths - 1).clamp(min=0).unsqueeze(1)).to(torch.int64)


@runtime_checkable
class KeepsHidden(Protocol):
    """What a drafter has besides that reads hidden states in captured steps too.

    The device keeps them from step to step; the drafter keeps them where the engine goes over from eager to captured
    steps and back.
    """

    def hidden_of(self, request_ids: Sequence[int]) -> list[torch.Tensor | None]:
        """Return the final hidden state [H] of each request's last committed token; None if it isn't known."""
        ...

    def keep_hidden(self, request_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Take note of the hidden states [R, H] of R requests' last committed tokens: all but the root is committed."""
        ...


@runtime_checkable
class DraftsOnDevice(Protocol):
    """What a drafter has besides that drafts without the host, so that its drafts are part of a captured step.

    Its drafts there may differ from those of `propose`; what is emitted can't.
    """

    chains_only: bool
    """Whether every tree is a chain, whose accepted nodes stand where they belong."""

    def max_device_nodes(self) -> int:
        """Return the most nodes of a tree, root included."""
        ...

    def draft_on_device(self, query: DeviceQuery, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft for each of S sequences without asking the host anything.

        Args:
            query: the sequences.
            num_nodes: n, columns of the result; at most `max_device_nodes`.

        Returns:
            tokens: [S, n] int64, root first, padded with any id of the vocabulary.
            parents: [S, n] int64, -1 for the root.
            num_nodes: [S] int32, nodes of each tree; 0 for inactive sequences.
        """
        ...
