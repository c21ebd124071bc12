"""The ranking of a drafter's candidates, by torch and by Triton, and the drafts that heads make of it."""

from dataclasses import replace

import pytest
import torch

from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.ngram_heads import NGramHeadsDrafter
from specdec.drafters.protocol import DeviceQuery, DraftQuery, Observation
from specdec.kernels import rank as torch_rank
from specdec.kernels.gpu import candidates as gpu_candidates
from specdec.kernels.gpu import cell as gpu_cell
from specdec.kernels.gpu import rank as gpu_rank
from specdec.kernels.gumbel import gumbel_noise
from specdec.models.decoder import Decoder
from specdec.models.head import DecoderHead, OutputHead
from specdec.params import SamplingParams
from tests.conftest import tiny_llama
from tests.families import tiny_model
from tests.hydra import random_hydra, random_recurrent
from tests.kernels import DEVICE, DTYPES, ON_GPU
from tests.medusa import random_medusa

pytestmark = pytest.mark.gpu if ON_GPU else []
RANK = pytest.mark.parametrize("rank", [torch_rank.rank, gpu_rank.rank], ids=["torch", "triton"])


def put(values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@RANK
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "num_ranks"), [(97, 1), (97, 97), (2500, 7)])
def test_candidates_are_the_best_scores(rank, dtype, vocab, num_ranks):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)
    temperature, seeds, positions = put([0, 0.8, 2.5], torch.float32), put([1, 2, 3]), put([0, 1, 5, 6, 0, 9])
    scores = logits.float().clone()
    rates = temperature.repeat_interleave(2)[2:, None]
    scores[2:] = scores[2:] / rates + gumbel_noise(seeds.repeat_interleave(2), positions, vocab)[2:]
    got = rank(logits, temperature, seeds, positions, num_ranks, 2)
    want = scores.sort(descending=True, stable=True)
    assert torch.equal(scores.gather(1, got), want.values[:, :num_ranks])
    assert torch.equal(got[:2], want.indices[:2, :num_ranks]), "of tied tokens the lowest id comes first"


@RANK
def test_columns_of_a_draft_vocabulary_have_their_tokens_noise(rank):
    """Ranking some columns by their tokens is ranking all tokens, of which only those have finite scores."""
    ids = put(sorted(torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:1100].tolist()))
    logits = torch.randn(4, 1100, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    arguments = put([0, 1.2, 0.4, 3], torch.float32), put([1, 2, 3, 2**40 + 7]), put([0, 5, 6, 9]), 8
    whole = torch.full((4, 3000), -torch.inf, device=DEVICE).index_copy(1, ids, logits)
    assert torch.equal(rank(logits, *arguments, token_ids=ids), torch_rank.rank(whole, *arguments))
    with pytest.raises(ValueError, match="1100 columns of logits don't fit 9 token ids"):
        rank(logits, *arguments, token_ids=ids[:9])


@RANK
def test_rows_without_enough_scores_still_name_tokens(rank):
    logits = torch.full((3, 1100), -torch.inf, device=DEVICE)
    logits[0] = torch.nan
    logits[1, 1050] = 0
    logits[2, 7], logits[2, 3] = 1, torch.nan
    got = rank(logits, put([0, 1, 0], torch.float32), put([1] * 3), put([0] * 3), 4)
    assert (got >= 0).all() and (got < 1100).all()
    assert got[1:, 0].tolist() == [1050, 7]


@RANK
def test_sizes_that_do_not_fit_are_refused(rank):
    arguments = torch.zeros(4, 9), torch.zeros(2), torch.zeros(2), torch.zeros(4)
    for num_ranks in (0, 10):
        with pytest.raises(ValueError, match=f"num_ranks must be from 1 to 9, not {num_ranks}"):
            rank(*arguments, num_ranks, 2)
    with pytest.raises(ValueError, match="4 rows of logits don't fit"):
        rank(*arguments, 3)


HEADS = pytest.mark.parametrize(
    "random_heads", [random_medusa, random_hydra, random_recurrent], ids=["medusa", "hydra", "recurrent"]
)


def device_query() -> DeviceQuery:
    """Sequences for heads of a hidden size of 32. The third one has no hidden state, the fourth is inactive."""
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    histories = [[3, 4, 5], [9, 8, 7, 6], [1, 2], []]
    return DeviceQuery(
        history=torch.tensor([h + [0] * (8 - len(h)) for h in histories], dtype=torch.int32, device=DEVICE),
        lengths=put([3, 4, 2, 0]),
        prompt_lens=put([2, 3, 1, 0]),
        seeds=put([5, 6, 7, 0]),
        temperature=put([0, 1.3, 0, 0], torch.float32),
        hidden=torch.cat([hidden, torch.full_like(hidden, torch.nan)]),
        has_hidden=put([1, 1, 0, 0], torch.bool),
    )


@HEADS
@pytest.mark.parametrize(("num_nodes", "draft_vocab"), [(1, None), (2, None), (4, 31), (6, None), (6, 31)])
def test_heads_draft_the_same_tree_on_the_device(random_heads, num_nodes, draft_vocab, no_int8):
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=1).to(DEVICE)
    drafter = random_heads(model, draft_vocab=draft_vocab)
    query = device_query()
    histories = [row[:length] for row, length in zip(query.history.tolist(), query.lengths.tolist(), strict=True)]
    params = [SamplingParams(seed=5), SamplingParams(seed=6, temperature=1.3), SamplingParams(seed=7)]
    drafter.observe(Observation([0, 1], [2, 3], query.hidden[:2].repeat_interleave(put([2, 3]), 0)))
    tree = drafter.propose(
        [DraftQuery(i, h, 1, num_nodes, p) for i, (h, p) in enumerate(zip(histories[:3], params, strict=True))]
    )
    tokens, parents, count = drafter.draft_on_device(query, num_nodes)
    assert count.tolist() == [num_nodes, num_nodes, 1, 0] and count.dtype == torch.int32
    for b in range(3):
        assert tokens[b, : count[b]].tolist() == tree.tokens_of(b)
        assert not draft_vocab or all(token % 3 == 1 for token in tree.tokens_of(b)[1:])
        assert parents[b, : count[b]].tolist() == tree.parents_of(b)
    assert ((tokens >= 0) & (tokens < 97)).all()


def test_a_sure_match_takes_the_place_of_the_heads_tree():
    """A match of three tokens is sure, one of two isn't; the third has no hidden state, the last is inactive."""
    histories = [[5, 6, 7, 8, 5, 6, 7], [6, 7, 8, 5, 6, 7], [5, 6, 7, 8, 5, 6, 7], []]
    query = replace(
        device_query(),
        history=torch.tensor([h + [0] * (8 - len(h)) for h in histories], dtype=torch.int32, device=DEVICE),
        lengths=put([len(h) for h in histories]),
    )
    heads = random_medusa(tiny_llama(dtype=torch.float32, num_hidden_layers=1).to(DEVICE))
    tokens, parents, sizes = NGramHeadsDrafter(NGramDrafter(), heads).draft_on_device(query, 6)
    assert sizes.tolist() == [6, 6, 6, 0] and sizes.dtype == torch.int32
    for b in (0, 2):
        assert tokens[b].tolist() == [7, 8, 5, 6, 7, 8] and parents[b].tolist() == [-1, 0, 1, 2, 3, 4]
    of_heads = heads.draft_on_device(query, 6)
    assert torch.equal(tokens[1], of_heads[0][1]) and torch.equal(parents[1], of_heads[1][1])


@HEADS
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_what_kernels_cannot_take_apart_is_composed(random_heads, projection, monkeypatch, no_int8):
    """Embeddings and scores that may be more than a matrix; the drafts are the same where they are nothing more."""
    calls = []
    for module, name in ((gpu_candidates, "candidates"), (gpu_cell, "cell")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, k=kernel, n=name, **b: calls.append(n) or k(*a, **b))
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=1).to(DEVICE)
    drafter, query = random_heads(model), device_query()
    guesses = drafter._guesses
    if projection == "own":
        own = model.lm_head.weight.detach().flip(0).repeat(3, 1, 1)
        guesses._heads.projection = torch.nn.Parameter(own, requires_grad=False)
    fused, *_ = drafter.draft_on_device(query, 6)
    assert ("candidates" in calls) == (random_heads is not random_medusa or projection == "shared")
    assert ("cell" in calls) == (random_heads is random_recurrent)
    head, embed = guesses._host.lm_head, getattr(guesses, "_embed", None)
    guesses._candidates._lm_head = lambda states: head(states)
    guesses._embed = lambda ids: embed(ids)
    calls.clear()
    composed, *_ = drafter.draft_on_device(query, 6)
    assert torch.equal(fused[:2], composed[:2])
    assert calls == (["candidates"] * 3 if projection == "own" and random_heads is not random_medusa else [])


def test_only_heads_that_are_a_product_have_a_matrix():
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=1)
    weight, ids = model.lm_head.weight, torch.tensor([3, 50])
    rows, whole = OutputHead(model, ids).matrix, DecoderHead(Decoder(model)).matrix
    assert rows is not None and whole is not None and rows[1] is None and whole[1] is None
    assert torch.equal(rows[0], weight[ids]) and torch.equal(whole[0], weight)
    capped = tiny_model("gemma2")
    assert OutputHead(capped, ids).matrix is None and DecoderHead(Decoder(capped)).matrix is None


@HEADS
def test_heads_hand_hidden_states_over_and_take_them_back(random_heads):
    drafter = random_heads(tiny_llama())
    row = torch.ones(1, 32, dtype=torch.float64)
    drafter.keep_hidden([4], row)
    kept, unknown = drafter.hidden_of([4, 5])
    assert kept is not None and torch.equal(kept, row[0]) and unknown is None
    assert len(drafter.propose([DraftQuery(4, [1] * 9, 2, 6, SamplingParams(seed=0))]).tokens) == 6
    drafter.forget([4])
    assert drafter.hidden_of([4]) == [None]
