"""Trees that grow by the heads' confidence: the likeliest nodes, no level in vain, and never another token."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters.draft_heads import HeadsConfig
from specdec.drafters.grown_tree import OTHER_ROWS, Path, Rank, grow, parents_of
from specdec.drafters.heads import make_heads
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.hydra import HydraDrafter
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.int8 import HostHeads
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.drafters.protocol import DraftQuery, Observation
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.kernels.gumbel import gumbel_noise
from specdec.params import SamplingParams
from tests.engines import make_engine, outputs, run
from tests.hydra import random_hydra, random_recurrent, walking_hydra
from tests.medusa import random_medusa, successor, target_of, walking_model

SIZE, NUM_HEADS, NUM_NODES = 8, 3, 7
ALL = [path for depth in range(1, NUM_HEADS + 1) for path in product(range(SIZE), repeat=depth)]


def scripted(*chances: Sequence[float], asked: list[list[Path]]) -> Rank:
    """Ranks tokens 0, 1, … with the same chances wherever they stand, those of each sequence."""

    def rank(
        sequences: Sequence[int], paths: Sequence[Path], above: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        before = asked[-1] if asked else [()] * len(chances)
        assert [before[row] for row in above] == [path[:-1] for path in paths]
        asked.append(list(paths))
        return [list(range(len(chances[b]))) for b in sequences], [list(chances[b]) for b in sequences]

    return rank


def test_a_sure_path_is_followed_and_an_unsure_one_is_not() -> None:
    asked: list[list[Path]] = []
    sure, unsure = grow(scripted([0.9, 0.05], [0.15, 0.1], asked=asked), [8, 8], 5, 0.12)
    assert sure == [(0,) * depth for depth in range(1, 6)] and unsure == [(0,)]
    assert parents_of(sure) == [-1, 0, 1, 2, 3, 4]
    asked.clear()
    assert grow(scripted([0.15, 0.1], asked=asked), [8], 5, 0.08) == [[(0,), (1,)]]
    assert asked == [[()]], "a second level wouldn't pay"
    assert grow(scripted([0.05], asked=asked), [8], 5, 0.08) == [[]]


def test_the_likeliest_nodes_come_first_and_no_more_than_wanted() -> None:
    (tree,) = grow(scripted([0.6, 0.3], asked=[]), [6], 3, 0.1)
    assert tree == [(0,), (0, 0), (1,), (0, 0, 0), (0, 1)]
    assert parents_of(tree) == [-1, 0, 1, 0, 2, 1]
    for size in range(2, 7):
        assert grow(scripted([0.6, 0.3], asked=[]), [size], 3, 0.1) == [tree[: size - 1]]
    assert grow(scripted([1.0, 1.0], asked=[]), [4], 3, 0.1) == [[(0,), (1,), (0, 0)]], "parents before children"


def test_a_crowd_asks_more_of_a_node() -> None:
    rank = scripted(*[[0.55, 0.4]] * OTHER_ROWS, asked=[])
    assert grow(rank, [8] * OTHER_ROWS, 3, 0.1) == [[(0,)]] * OTHER_ROWS, "half of the step's time is rows"


def drafter_of(kind: str, model: PreTrainedModel) -> HeadsDrafter:
    """Random heads of a kind with moderate logits, for `NUM_NODES` nodes."""
    target = target_of(model)
    config = HeadsConfig(
        kind=kind,  # type: ignore[arg-type]
        num_heads=NUM_HEADS,
        num_layers=int(kind == "medusa"),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        projection="own",
        draft_vocab=SIZE,
    )
    heads = make_heads(config, target.device, target.dtype).requires_grad_(False)
    torch.manual_seed(3)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    drafter: HeadsDrafter
    if isinstance(heads, MedusaHeads):
        drafter = MedusaDrafter(heads, target, max_nodes=NUM_NODES)
    elif isinstance(heads, RecurrentHeads):
        drafter = RecurrentDrafter(heads, target, max_nodes=NUM_NODES)
    else:
        assert isinstance(heads, HydraHeads)
        drafter = HydraDrafter(heads, target, max_nodes=NUM_NODES)
    return drafter


def chances_of(drafter: HeadsDrafter, hidden: Tensor, query: DraftQuery) -> dict[Path, float]:
    """The chance of each path there is, one at a time."""
    host: HostHeads = drafter._guesses._host  # type: ignore[attr-defined]
    embed = drafter._target.embed
    assert embed is not None
    chances: dict[Path, float] = {(): 1.0}
    for path in ALL:
        k = len(path) - 1
        following = embed(torch.tensor([[query.tokens[-1], *path[:-1]]]))
        logits = host.project(host.heads.states(hidden[None], following, k + 1)[:, k:], k)[0, 0].double()
        if t := query.params.temperature:
            noise = gumbel_noise(torch.tensor([query.params.seed]), torch.tensor([query.num_output + k]), SIZE)[0]
            logits = logits.log_softmax(-1) + t * noise
        chances[path] = chances[path[:-1]] * float(logits.softmax(-1)[path[-1]])
    return chances


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_a_tree_holds_the_likeliest_of_all_paths(
    kind: str, tiny: PreTrainedModel, no_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.drafters.grown_tree.PARENTS_CHANCE", 0.0)
    monkeypatch.setattr("specdec.drafters.grown_tree.OTHER_ROWS", 10**12)
    drafter = drafter_of(kind, tiny)
    hidden = torch.randn(3, tiny.config.hidden_size, dtype=tiny.dtype)
    params = [SamplingParams(seed=5 + i, temperature=t) for i, t in enumerate((0.0, 0.7, 1.5))]
    queries = [DraftQuery(i, [3, i], 1 + i, n, p) for i, (n, p) in enumerate(zip((64, 64, 4), params, strict=True))]
    for least in (1e-9, 0.2):
        drafter.min_chance = least
        drafter.observe(Observation([0, 1, 2], [1, 1, 1], hidden))
        tree = drafter.propose(queries)
        for b, query in enumerate(queries):
            chances = chances_of(drafter, hidden[b], query)
            wanted = sorted((p for p in ALL if chances[p] >= least), key=lambda p: -chances[p])
            wanted = wanted[: min(NUM_NODES, query.max_nodes) - 1]
            assert tree.tokens_of(b) == [b, *(path[-1] for path in wanted)]
            assert tree.parents_of(b) == parents_of(wanted)
        if least < 0.1:
            assert [tree.num_nodes(b) for b in range(3)] == [NUM_NODES, NUM_NODES, 4]


@torch.inference_mode()
def test_heads_that_know_the_model_draft_its_answer() -> None:
    """Logits of 40 leave no doubt: chains, though the static tree would hold a sibling first."""
    model = walking_model()
    drafter = walking_hydra(model, [(0,), (1,), (2,), (0, 0)])
    heads = drafter._guesses._heads
    assert heads.projection is not None
    heads.projection.mul_(40)
    drafter = HydraDrafter(heads, target_of(model), [(0,), (1,), (2,), (0, 0)])  # type: ignore[arg-type]
    drafter.min_chance = 0.1
    (request,) = run(make_engine(model, drafter), [[1, 2, 3]], [SamplingParams(max_new_tokens=21, ignore_eos=True)])
    token = 3
    assert outputs([request])[0] == [token := successor(token) for _ in range(21)]
    assert request.stats.mean_acceptance_length > 3, "four a step, but for the prompt's"
    assert request.stats.num_draft_tokens == request.stats.num_accepted_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("make", [random_medusa, random_hydra, random_recurrent])
def test_no_token_changes(make: type, temperature: float, tiny: PreTrainedModel) -> None:
    prompts = [[5, 6, 7], [50] * 18, [11, 3]]
    params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=i) for i in range(3)]
    plain = outputs(run(make_engine(tiny), prompts, params))
    drafter = make(tiny)
    drafter.min_chance = 1e-9
    requests = run(make_engine(tiny, drafter), prompts, params)
    assert outputs(requests) == plain and sum(r.stats.num_draft_tokens for r in requests) > 0
