"""Labels, order and loss of the trainer, against what a reader would write down."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specdec.drafters.medusa_heads import HeadsConfig, MedusaHeads
from specdec.errors import ConfigError, InvalidRequest
from specdec.training.batches import (
    IGNORE,
    BatchOrder,
    ahead,
    fingerprint,
    label_counts,
    make_batch,
)
from specdec.training.clock import Clock
from specdec.training.config import TrainConfig
from specdec.training.data import Example
from specdec.training.loss import HeadsLoss, Inputs
from specdec.training.metrics import count_ranks, summarize
from specdec.training.vocab import frequent_tokens
from tests.training import examples

H, V, K = 8, 23, 3


def heads_of(projection: str, draft_vocab: int | None = None) -> MedusaHeads:
    config = HeadsConfig(
        num_heads=K,
        num_layers=2,
        hidden_size=H,
        vocab_size=V,
        projection=projection,  # type: ignore[arg-type]
        draft_vocab=draft_vocab,
    )
    heads = MedusaHeads(config, dtype=torch.float64)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads


def inputs(rows: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, labels of which some are missing, the base's head."""
    torch.manual_seed(0)
    labels = torch.randint(V, (rows, K)).masked_fill(torch.rand(rows, K) < 0.3, IGNORE)
    return torch.randn(rows, H, dtype=torch.float64), labels, torch.randn(V, H, dtype=torch.float64)


def naive(heads: MedusaHeads, hidden: Tensor, labels: Tensor, head: Tensor, decay: float) -> Tensor:
    logits = heads(hidden, lambda x: F.linear(x, head))  # [T, K, V]
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        losses = [-logits[t, k].log_softmax(-1)[y] for t, y in enumerate(labels[:, k].tolist()) if y != IGNORE]
        if losses:
            total = total + decay**k * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_loss_and_gradients_are_those_of_the_whole_product(projection: str, chunk_rows: int) -> None:
    heads = heads_of(projection)
    hidden, labels, head = inputs()
    seen = []

    def lm_head(x: Tensor) -> Tensor:
        seen.append(len(x))
        return F.linear(x, head)

    loss, means = HeadsLoss(heads, lm_head, 0.8, chunk_rows * K * V)(Inputs(hidden, labels), (labels != IGNORE).sum(0))
    loss.backward()
    found = [parameter.grad for parameter in heads.parameters()]
    expected = naive(heads, hidden, labels, head, 0.8)
    wanted = torch.autograd.grad(expected, list(heads.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, list(wanted))
    torch.testing.assert_close((means * torch.tensor([1, 0.8, 0.64])).sum(), expected)
    assert all(rows <= chunk_rows * K for rows in seen)  # never more of the vocabulary's product than that
    assert sum(seen) == (len(labels) * K if projection == "shared" else 0), "and each row of it once"


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_gradients_scale_and_add_up(projection: str, soft: bool) -> None:
    """As they do where a loss is multiplied, for several processes, or where batches are summed."""
    heads = heads_of(projection)
    hidden, labels, head = inputs()
    counts = (labels != IGNORE).sum(0)
    sources = torch.randn(*labels.shape, H, dtype=torch.float64) if soft else None
    module = HeadsLoss(heads, lambda x: F.linear(x, head), 0.8, 4 * K * V)
    hidden.requires_grad_()
    for weight in (3.0, -1.0):
        (module(Inputs(hidden, labels, sources=sources), counts)[0] * weight).backward()
    log_chances = heads(hidden, lambda x: F.linear(x, head)).log_softmax(-1)
    targets = F.one_hot(labels.clamp(min=0), V).double() if sources is None else F.linear(sources, head).softmax(-1)
    losses = -(targets * log_chances).sum(-1) * (labels != IGNORE) / counts
    wanted = torch.autograd.grad(
        2 * (losses.sum(0) * torch.tensor([1, 0.8, 0.64])).sum(), [*heads.parameters(), hidden]
    )
    torch.testing.assert_close([parameter.grad for parameter in [*heads.parameters(), hidden]], list(wanted))


def test_products_in_16_bits_leave_gradients_in_32() -> None:
    """As accelerate runs them on a GPU."""
    heads = heads_of("own").float()
    hidden, labels, head = inputs(40)
    found = []
    for enabled in (False, True):
        heads.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            inputs_of = Inputs(hidden.float(), labels, sources=torch.ones(*labels.shape, H))
            loss, _ = HeadsLoss(heads, lambda x: F.linear(x, head.float()), 0.8, 9 * K * V)(
                inputs_of, (labels != IGNORE).sum(0)
            )
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in heads.parameters())])
    assert all(tensor.dtype == torch.float32 for some in found for tensor in some if tensor is not None)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_soft_labels_are_the_bases_distribution_where_there_is_a_label(chunk_rows: int) -> None:
    heads = heads_of("shared")
    hidden, labels, head = inputs()
    sources, counts = torch.randn(*labels.shape, H, dtype=torch.float64), (labels != IGNORE).sum(0)
    loss, means = HeadsLoss(heads, lambda x: F.linear(x, head), 0.8, chunk_rows * K * V)(
        Inputs(hidden, labels, sources=sources), counts
    )
    chances, guesses = F.linear(sources, head).softmax(-1), heads(hidden, lambda x: F.linear(x, head)).log_softmax(-1)
    crossed = -(chances * guesses).sum(-1)  # [T, K]
    wanted = torch.stack([crossed[labels[:, k] != IGNORE, k].mean() for k in range(K)])
    torch.testing.assert_close(means, wanted.detach())
    torch.testing.assert_close(loss, (wanted * torch.tensor([1, 0.8, 0.64], dtype=torch.float64)).sum())


def test_no_rows_and_heads_without_labels_give_finite_losses_and_gradients() -> None:
    heads = heads_of("shared")
    hidden, labels, head = inputs()
    labels[:, 1] = IGNORE
    loss = HeadsLoss(heads, lambda x: F.linear(x, head), 0.8)
    counts = (labels != IGNORE).sum(0)
    torch.testing.assert_close(loss(Inputs(hidden, labels), counts)[0], naive(heads, hidden, labels, head, 0.8))
    nothing, _ = loss(Inputs(hidden[:0], labels[:0]), counts)  # this process's share of a small batch
    nothing.backward()
    assert nothing.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in heads.parameters())


def test_ranks_are_those_of_a_sort() -> None:
    heads = heads_of("shared")
    hidden, labels, head = inputs(40)
    loss = HeadsLoss(heads, lambda x: F.linear(x, head), 1.0, 7 * K * V)
    found = summarize(count_ranks(loss, Inputs(hidden, labels)))
    order = heads(hidden, lambda x: F.linear(x, head)).argsort(-1, descending=True)
    for k in range(K):
        known = labels[:, k] != IGNORE
        ranks = (order[known, k] == labels[known, k, None]).nonzero()[:, 1]
        shares = torch.bincount(ranks, minlength=V)[:10] / known.sum()
        torch.testing.assert_close(torch.tensor(found.accuracies[k]), shares)
        assert found.num_labels[k] == known.sum()


def test_a_label_is_the_token_that_many_places_behind_the_root() -> None:
    short = Example((5, 6, 7), (True, True, True))
    long = Example((1, 2, 3, 4, 9), (False, False, True, False, True))
    batch = make_batch([short, long], 2)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 0], [1, 2, 3, 4, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch.rows.tolist() == [0, 5, 6, 7]
    assert batch.labels.tolist() == [[7, IGNORE], [3, IGNORE], [IGNORE, 9], [9, IGNORE]]
    assert batch.following.tolist() == [[6, 7], [2, 3], [3, 4], [4, 9]]
    assert batch.sources.tolist() == [[1, 2], [6, 7], [7, 8], [8, 9]]  # those of the tokens before the labels
    assert label_counts([short, long], 2) == [3, 1]
    assert make_batch([], 2).rows.tolist() == []


def test_an_epoch_holds_every_example_once_in_batches_that_fit() -> None:
    data, config = examples(50), TrainConfig(batch_tokens=64, seed=3)
    batches = []
    for batch in BatchOrder(data, config):
        batches.append(batch)
        if sum(map(len, batches)) >= len(data):
            break
    assert sorted(e.input_ids for b in batches for e in b) == sorted(e.input_ids for e in data)
    assert all(len(b) * max(len(e.input_ids) for e in b) <= 64 for b in batches)
    again = list(islice(BatchOrder(data, config), 40))
    assert again == list(islice(BatchOrder(data, config), 40)) and again[: len(batches)] == batches
    assert again[len(batches) : 2 * len(batches)] != batches  # the next epoch has another order
    assert again != list(islice(BatchOrder(data, TrainConfig(batch_tokens=64, seed=4)), 40))


def test_batches_without_a_label_are_skipped_and_counted() -> None:
    silent = Example((1, 2, 3, 4), (True, True, False, False))  # nothing predicts the first two
    order = BatchOrder([silent, silent, *examples(2)], TrainConfig(batch_tokens=16))
    batches = list(islice(order, 6))
    assert all(any(any(e.answer[2:]) for e in batch) for batch in batches) and order.num_skipped > 0
    for bad, reason in (([silent], "no"), ([], "no"), ([Example((1,) * 17, (True,) * 17)], "17 tokens")):
        with pytest.raises(InvalidRequest, match=reason):
            BatchOrder(bad, TrainConfig(batch_tokens=16))


def test_a_fingerprint_tells_sets_apart() -> None:
    data = examples(60)
    assert fingerprint(data[:50], data[50:]) != fingerprint(data[50:], data[:50])
    assert fingerprint(data[:50], data[50:]) == fingerprint(list(data[:50]), list(data[50:]))


@pytest.mark.parametrize(
    "field", [{"steps": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"decay": 1.5}, {"clip": -1.0}, {"weight_decay": 1.0}]
)
def test_config_is_checked(field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        TrainConfig(**field)  # type: ignore[arg-type]


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    config = TrainConfig(steps=110, warmup=10, lr=1.0)
    rates = [config.lr_at(step) for step in range(111)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[60] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[110] == pytest.approx(0)
    assert config.lr_at(4, spent=0.5) == 0.25 and config.lr_at(90, spent=0.5) == rates[90] > config.lr_at(90, spent=0.9)
    assert config.lr_at(50, spent=1.0) == pytest.approx(0)


def test_a_clock_says_what_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock(50, now)
    runs, late = clock.runs_until(0.4), clock.span_to(-1)
    now = 119.0
    assert runs() and late() == 1
    now = 120.0
    span = clock.span_to(0.8)
    assert not runs() and span() == 0
    for later, share in ((130.0, 0.5), (140.0, 1.0), (150.0, 1.0)):
        now = later
        assert span() == share
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="time limit must be above 0"):
            Clock(seconds)


def test_one_item_is_made_ahead() -> None:
    made: list[int] = []
    for number in ahead(range(5), lambda x: made.append(x) or x):  # type: ignore[func-returns-value]
        assert number <= made[-1] <= number + 1
    assert made == [0, 1, 2, 3, 4] and list(ahead([], str)) == []
    with pytest.raises(ZeroDivisionError):
        list(ahead([1, 0, 2], lambda x: 1 / x))


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_labels_outside_the_draft_vocabulary_have_no_loss_but_count_as_misses(projection: str) -> None:
    ids = torch.tensor([0, 3, 4, 11, 20])
    heads = heads_of(projection, draft_vocab=len(ids))
    assert heads.token_ids is not None
    heads.token_ids.copy_(ids)
    hidden, labels, head = inputs(60)
    inside = torch.isin(labels, ids)
    counts = (labels != IGNORE).sum(0)
    assert 0 < inside.sum() < counts.sum()
    module = HeadsLoss(heads, lambda x: F.linear(x, head[ids]), 0.8, 4 * K * len(ids))
    loss, means = module(Inputs(hidden, labels), counts)
    logits = heads(hidden, lambda x: F.linear(x, head[ids]))
    for k in range(K):
        losses = [-logits[t, k].log_softmax(-1)[ids.tolist().index(y)] for t, y in enumerate(labels[:, k]) if y in ids]
        torch.testing.assert_close(means[k], torch.stack(losses).sum() / counts[k])
    sources = torch.randn(*labels.shape, H, dtype=torch.float64)
    soft, crossed = module(Inputs(hidden, labels, sources=sources), counts)
    chances = F.linear(sources, head[ids]).softmax(-1)
    wanted = -(chances * logits.log_softmax(-1)).sum(-1).masked_fill(~inside, 0).sum(0) / counts
    torch.testing.assert_close(crossed, wanted.detach())
    (loss + soft).backward()
    found = summarize(count_ranks(module, Inputs(hidden, labels)))
    assert found.num_labels == counts.tolist()
    assert [sum(head) for head in found.accuracies] == pytest.approx((inside.sum(0) / counts).tolist())


def test_the_most_frequent_answer_tokens() -> None:
    texts = [Example((7, 5, 5, 2, 2, 9), (False, True, True, True, True, True)), Example((2, 7), (True, False))]
    assert frequent_tokens(texts, 3, 20) == [2, 5, 9]
    assert frequent_tokens(texts, 5, 20) == [2, 5, 9, 0, 1], "then the lowest ids"
    with pytest.raises(ConfigError, match="1 to 20 tokens, as many as the model's, not 21"):
        frequent_tokens(texts, 21, 20)
