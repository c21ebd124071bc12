"""What the device knows of the sequences that captured steps run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.drafters.protocol import DeviceQuery
from specdec.engine.request import Request
from specdec.params import MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What the device knows of S sequences. A sequence of length 0 is inactive.

    Args:
        history: [S, L] int32, prompt and output.
        lengths: [S] int64, tokens known, the root included.
        prompt_lens: [S] int64.
        seeds: [S] int64.
        temperature: [S] float32.
        top_k: [S] int64.
        top_p: [S] float64, in which probabilities add up.
        min_p: [S] float64.
        max_nodes: [S] int32, most nodes of a tree by the request's own wish.
        block_table: [S, M] int32.
        hidden: [S, H], final hidden state of the token before the root, which yielded it; H is 0 where the drafter
            doesn't read it.
        has_hidden: [S] bool, whether it is known.
    """

    history: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_nodes: Tensor
    block_table: Tensor
    hidden: Tensor
    has_hidden: Tensor

    @classmethod
    def make(
        cls,
        num_seqs: int,
        max_len: int,
        num_blocks: int,
        device: torch.device,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "DeviceState":
        """Make the state of inactive sequences.

        Args:
            num_seqs: S.
            max_len: L, most tokens of a sequence.
            num_blocks: M, most blocks of a sequence.
            device: where it is.
            hidden_size: H of the hidden states to keep; 0 keeps none.
            dtype: theirs.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            history=zeros(num_seqs, max_len, dtype=torch.int32),
            lengths=zeros(num_seqs),
            prompt_lens=zeros(num_seqs),
            seeds=zeros(num_seqs),
            temperature=zeros(num_seqs, dtype=torch.float32),
            top_k=zeros(num_seqs),
            top_p=zeros(num_seqs, dtype=torch.float64),
            min_p=zeros(num_seqs, dtype=torch.float64),
            max_nodes=zeros(num_seqs, dtype=torch.int32).fill_(MAX_SPECULATIVE_TOKENS + 1),
            block_table=zeros(num_seqs, num_blocks, dtype=torch.int32),
            hidden=zeros(num_seqs, hidden_size, dtype=dtype),
            has_hidden=zeros(num_seqs, dtype=torch.bool),
        )

    def load(self, requests: Sequence[Request]) -> None:
        """Put requests into the first places, and nothing into the others.

        Block tables and hidden states are loaded apart.
        """
        count, width = len(requests), max(len(r.tokens) for r in requests)
        tokens = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in requests], dtype=torch.int32)
        self.history[:count, :width] = tokens.to(self.history.device)
        self.lengths.zero_()
        columns = [
            [len(r.tokens), r.prompt_len, _seed(r), min(r.params.top_k, _INT64_MAX), r.params.max_nodes]
            for r in requests
        ]
        _fill((self.lengths, self.prompt_lens, self.seeds, self.top_k, self.max_nodes), torch.tensor(columns))
        rates = [[r.params.temperature, r.params.top_p, r.params.min_p] for r in requests]
        _fill((self.temperature, self.top_p, self.min_p), torch.tensor(rates, dtype=torch.float64))

    def load_hidden(self, rows: Sequence[Tensor | None]) -> None:
        """Put hidden states [H] into the first places; None where one isn't known."""
        self.has_hidden.zero_()
        self.has_hidden[: len(rows)] = torch.tensor([row is not None for row in rows]).to(self.has_hidden.device)
        nothing = torch.zeros_like(self.hidden[0])
        self.hidden[: len(rows)] = torch.stack([nothing if row is None else row for row in rows])

    def query(self, num_seqs: int) -> DeviceQuery:
        """Return what a drafter is given of the first sequences: views, no copies."""
        return DeviceQuery(*(getattr(self, field.name)[:num_seqs] for field in fields(DeviceQuery)))


_INT64_MAX = torch.iinfo(torch.int64).max


def _fill(fields: Sequence[Tensor], values: Tensor) -> None:
    """Put each column of values [count, fields] into the first places of its field, in one copy to the device."""
    for field, column in zip(fields, values.to(fields[0].device).T, strict=True):
        field[: len(column)] = column


def _seed(request: Request) -> int:
    assert request.params.seed is not None, "the engine gives each request a seed"
    return request.params.seed
