"""Noise, processed logits and acceptance rules: the choice is the target's, whatever the tree.

Statistical tests draw from fixed seeds, so they never flake; the failure rate they state is the chance that a
right implementation with other constants would fail.
"""

import math
import random
import runpy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import ConfigError, SpecdecError
from specdec.kernels.gumbel import gumbel_noise, gumbel_noise_at, philox4x32, philox_uint32
from specdec.params import SamplingParams
from specdec.verifier import rules
from specdec.verifier.processors import NodeContext, process_logits
from specdec.verifier.rules import RULES, Accepted, CoupledRule, TypicalRule, VerifyQuery, choose, make_rule
from specdec.verifier.tree import MAX_NODES, TokenTree, chain_parents, merge_paths
from tests.kernels import DEVICE

V = 16
FALSE_FAILURE_RATE = 1e-6


def fit(counts: Tensor, probs: Tensor) -> float:
    """p-value of Pearson's χ² test of counts [n] against probs [n]; cells expecting fewer than 5 are pooled."""
    counts, expected = counts.double(), probs.double() * counts.sum()
    big = expected >= 5
    counts = torch.cat([counts[big], counts[~big].sum().reshape(1)])
    expected = torch.cat([expected[big], expected[~big].sum().reshape(1)])
    if expected[-1] == 0:
        assert counts[-1] == 0, "an impossible outcome was drawn"
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


# --- noise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, output):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [word.item() for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == output


TRITON_SCRIPT = """
import torch, triton, triton.language as tl
from specdec.kernels.gumbel import philox_uint32

@triton.jit
def kernel(out, seed, position, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b, c, d = tl.philox(seed, i, position, 0, 0)
    tl.store(out + 4 * i, a.to(tl.int64))
    tl.store(out + 4 * i + 1, b.to(tl.int64))
    tl.store(out + 4 * i + 2, c.to(tl.int64))
    tl.store(out + 4 * i + 3, d.to(tl.int64))

for seed, position in ((0, 0), (1, 2), (2**63 - 1, 7), (2**31, 2**31 - 1), (2**32 - 1, 5)):
    out = torch.empty(1024, dtype=torch.int64, device=device)
    kernel[(1,)](out, seed, position, 256)
    torch.testing.assert_close(out.cpu(), philox_uint32(torch.tensor([seed]), torch.tensor([position]), 1024)[0])
"""


def test_words_are_those_of_triton(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"  # a jitted function must live in a file
    script.write_text(TRITON_SCRIPT)
    runpy.run_path(str(script), {"device": DEVICE})


def test_noise_is_the_double_logarithm_of_the_word_and_can_be_drawn_for_some_ids_alone():
    seeds, positions = torch.tensor([3, 2**62 + 5, 2**63 - 1]), torch.tensor([0, 17, 2**32 - 1])
    noise = gumbel_noise(seeds, positions, 1001)
    assert (noise.shape, noise.dtype) == ((3, 1001), torch.float32)
    words = philox_uint32(seeds, positions, 1001)
    for row, token in ((0, 0), (1, 500), (2, 1000)):
        uniform = (words[row, token].item() + 0.5) / 2**32
        assert noise[row, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-7)
    ids = torch.tensor([[0, 1000, 7], [3, 3, 4], [999, 0, 1]])
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), noise.gather(1, ids))


def noise_words(varying: str, count: int) -> Tensor:
    """[count] words of seed 11, position 3, token 6, except that one of the three runs from 0 to count - 1."""
    many, eleven, three = torch.arange(count), torch.tensor([11]), torch.tensor([3])
    if varying == "token":
        return philox_uint32(eleven, three, count)[0]
    seeds = many if varying == "seed" else eleven.expand(count)
    positions = many if varying == "position" else three.expand(count)
    return philox_uint32(seeds, positions, 8)[:, 6]


@pytest.mark.parametrize("varying", ["seed", "position", "token"])
@pytest.mark.parametrize("shift", [24, 0])
def test_words_are_uniform_and_neighbours_independent(varying, shift):
    """In their highest and lowest byte: 256 values, and 256 pairs of neighbouring nibbles; rate 1e-6 each."""
    words = noise_words(varying, 2**16) >> shift
    flat = torch.full((256,), 1 / 256)
    assert fit(torch.bincount(words & 255, minlength=256), flat) > FALSE_FAILURE_RATE
    nibbles = (words >> 4) & 15
    for lag in (1, 4):
        pairs = nibbles[:-lag] * 16 + nibbles[lag:]
        assert fit(torch.bincount(pairs, minlength=256), flat) > FALSE_FAILURE_RATE


def test_gumbel_max_draws_from_the_softmax():
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0))
    noise = gumbel_noise(torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64), V)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=V)
    assert fit(counts, logits.softmax(-1)) > FALSE_FAILURE_RATE


def test_drafts_ranked_with_the_targets_noise_beat_the_most_likely_ones():
    """Chance that the target's draw is among k candidates; the coupled ones are worth the design's figures."""
    trials, size, generator = 1500, 400, torch.Generator().manual_seed(1)
    target = 3 * torch.randn(trials, size, generator=generator)
    draft = target + torch.randn(trials, size, generator=generator)
    noise = gumbel_noise(torch.arange(trials), torch.zeros(trials, dtype=torch.int64), size)
    drawn = (target + noise).argmax(-1, keepdim=True)
    coupled = ((draft + noise).topk(4).indices == drawn).cumsum(-1).double().mean(0)
    likely = (draft.topk(4).indices == drawn).cumsum(-1).double().mean(0)
    assert (coupled > likely + 0.2).all()
    assert coupled[0] > 0.5
    assert coupled[3] > 0.8


# --- processed logits ---------------------------------------------------------------------------------------


def node(sequence: int = 0, num_output: int = 0, path: tuple[int, ...] = (), **params: float | None) -> NodeContext:
    asked = SamplingParams(**({"seed": 7} | params))
    return NodeContext(sequence, VerifyQuery(asked, [1] * (num_output + 1), num_output), path)


def transformers_scores(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits)


WARPED = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 10**6},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", ["small", "ties", "flat"])  # flat: a nucleus beyond the part sorted first
def test_rows_are_warped_as_transformers_does_each_with_its_own_parameters(dtype, shape):
    generator = torch.Generator().manual_seed(2)
    size = 3000 if shape == "flat" else 40
    logits = torch.randn(len(WARPED), size, generator=generator, dtype=dtype) * (0.5 if shape == "flat" else 2)
    if shape == "ties":
        logits = logits.round()
    before = logits.clone()
    nodes = [node(**params) for params in WARPED]
    scores = process_logits(logits, nodes, size)
    assert torch.equal(logits, before)
    assert scores.dtype == dtype
    for row, context in enumerate(nodes):
        expected = transformers_scores(logits[row : row + 1], context.params)
        assert torch.equal(process_logits(logits[row : row + 1], [context], size)[0], scores[row])
        if shape == "ties":  # which of the tokens tied at the nucleus' edge stay is left open there
            assert torch.equal(scores[row].sort().values, expected[0].sort().values)
        else:
            assert torch.equal(scores[row], expected[0])


def test_tokens_tied_at_the_kth_place_all_stay():
    scores = process_logits(torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]]), [node(temperature=1.0, top_k=2)], 5)
    assert scores.tolist() == [[3.0, -math.inf, 2.0, 2.0, -math.inf]]


def test_of_tokens_tied_at_the_nucleus_edge_the_lowest_ids_stay():
    scores = process_logits(torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]), [node(temperature=1.0, top_p=0.65)], 5)
    assert scores.tolist() == [[0.0, 1.0, 0.0, -math.inf, -math.inf]]


def test_greedy_rows_are_left_as_they_are_without_a_copy():
    logits = torch.randn(2, V)
    assert process_logits(logits, [node(top_k=2, top_p=0.5), node()], V).data_ptr() == logits.data_ptr()
    mixed = process_logits(logits, [node(temperature=0.5), node(top_k=2)], V)
    assert torch.equal(mixed, torch.stack([logits[0] / 0.5, logits[1]]))


def test_half_precision_is_processed_in_float32():
    assert process_logits(torch.randn(1, V).bfloat16(), [node()], V).dtype == torch.float32


def test_the_smallest_temperature_is_greedy_and_never_overflows():
    logits = torch.tensor([[30.0, 31.0, -5.0]])
    context = node(temperature=1e-40, top_p=0.9, min_p=0.1)
    scores = process_logits(logits, [context], 3)
    assert scores.isfinite().sum() == 1
    assert choose(scores, [context]).tolist() == [1]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="don't fit 1 rows"):
        process_logits(torch.zeros(2, V), [node()], V)
    for num_real_tokens in (0, V + 1):
        with pytest.raises(ValueError, match=f"rows of {num_real_tokens} tokens"):
            process_logits(torch.zeros(1, V), [node()], num_real_tokens)


# --- the choice ---------------------------------------------------------------------------------------------


def test_the_choice_is_the_argmax_of_scores_plus_noise_at_the_nodes_output_position():
    logits = torch.randn(3, V)
    nodes = [node(temperature=1.0, seed=5, num_output=3, path=(1, 2)), node(), node(temperature=1.0, seed=9)]
    noise = gumbel_noise(torch.tensor([5, 0, 9]), torch.tensor([5, 0, 0]), V)
    noise[1] = 0
    assert choose(logits, nodes).tolist() == (logits + noise).argmax(-1).tolist()


def test_the_choice_among_few_kept_tokens_is_that_of_the_whole_row():
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(3))
    nodes = [node(temperature=1.0, top_k=20, seed=seed, num_output=seed) for seed in range(8)]
    scores = process_logits(logits, nodes, 500)
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 500)
    assert choose(scores, nodes).tolist() == (scores + noise).argmax(-1).tolist()
    assert choose(scores, nodes).tolist() != scores.argmax(-1).tolist()


def test_a_tie_goes_to_the_lowest_id():
    logits = torch.zeros(1, 5000)
    logits[0, [77, 78, 4321]] = 1
    assert choose(logits, [node()]).tolist() == [77]


def test_a_row_without_a_seed_is_refused_when_it_samples():
    with pytest.raises(ValueError, match="sequence 2, output position 3 samples, but its request has no seed"):
        choose(torch.zeros(1, V), [node(sequence=2, num_output=3, temperature=1.0, seed=None)])
    assert choose(torch.zeros(1, V), [node(seed=None)]).tolist() == [0]


# --- a model that is a table, and its decoding --------------------------------------------------------------

Draft = Callable[[Sequence[int], random.Random], tuple[list[int], list[int]]]
"""Given the tokens emitted so far, the tokens and parents of a tree; the root's token doesn't matter."""


class TableModel:
    """A target over V = 16 tokens whose logits are looked up by the last two tokens of the output."""

    def __init__(self, seed: int = 0, scale: float = 2.0, vocab_size: int = V) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn((V + 1) ** 2, vocab_size, generator=generator, dtype=torch.float64)

    def row(self, output: Sequence[int]) -> int:
        """Index of the output's logits; an output that has not begun counts as a token of its own."""
        before, last = ([V, V, *output])[-2:]
        return before * (V + 1) + last

    def logits(self, tree: TokenTree, outputs: Sequence[Sequence[int]]) -> Tensor:
        """[N, V] float64 logits at each node."""
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        rows: list[int] = []
        for start, end, output in zip(tree.cu_nodes, tree.cu_nodes[1:], outputs, strict=False):
            prefixes = [list(output)]
            for i in range(start + 1, end):
                prefixes.append([*prefixes[parents[i]], tokens[i]])
            rows += [self.row(prefix) for prefix in prefixes]
        return self.table[rows]

    def decode(self, rule, params: Sequence[SamplingParams], draft: Draft, length: int, seed: int = 0):
        """Decode a batch until each output has `length` tokens or more; returns outputs and the number of steps."""
        outputs: list[list[int]] = [[] for _ in params]
        rng, num_steps = random.Random(seed), 0
        while active := [b for b, output in enumerate(outputs) if len(output) < length]:
            drafts = [draft(outputs[b], rng) for b in active]
            tree = TokenTree.build([tokens for tokens, _ in drafts], [parents for _, parents in drafts])
            logits = self.logits(tree, [outputs[b] for b in active])
            queries = [VerifyQuery(params[b], [0, *outputs[b]], len(outputs[b])) for b in active]
            for b, accepted in zip(active, rule(tree, logits, queries, V), strict=True):
                assert len(accepted.path) == len(accepted.tokens)
                outputs[b] += accepted.tokens
            num_steps += 1
        return outputs, num_steps


def no_draft(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    return [0], [-1]


def random_tree(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    n = rng.randint(1, MAX_NODES)
    return [rng.randrange(V) for _ in range(n)], [-1] + [rng.randrange(i) for i in range(1, n)]


def random_chain(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    n = rng.randint(2, 9)
    return [rng.randrange(V) for _ in range(n)], chain_parents(n)


def widest_tree(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    return [rng.randrange(V) for _ in range(MAX_NODES)], [-1] + [0] * (MAX_NODES - 1)


def greedy_draft(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """The two likeliest continuations, two tokens deep, under a model like the target but wrong in part."""
    drafter = GREEDY_DRAFTER
    first = drafter.table[drafter.row(output)].topk(2).indices.tolist()
    return merge_paths(0, [[t, int(drafter.table[drafter.row([*output, t])].argmax())] for t in first], 5)


GREEDY_DRAFTER = TableModel()
GREEDY_DRAFTER.table = GREEDY_DRAFTER.table + TableModel(seed=1, scale=1.0).table


# --- lossless: the joint distribution (a2) ------------------------------------------------------------------

SAMPLING = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.01}]


def joint(model: TableModel, params: SamplingParams) -> Tensor:
    """[V^3] exact probabilities of the first three tokens."""
    probs = transformers_scores(model.table, params).softmax(-1)
    out = probs[model.row([])]
    for depth in (1, 2):
        prefixes = [[i // V ** (depth - 1 - j) % V for j in range(depth)] for i in range(V**depth)]
        out = out.unsqueeze(1) * probs[[model.row(prefix) for prefix in prefixes]]
        out = out.flatten()
    return out


def joint_fit(rule, draft: Draft, asked: dict[str, float], samples: int = 8000) -> float:
    """p-value of the first three tokens, decoded with that many seeds, under the target's exact distribution."""
    model = TableModel()
    outputs, _ = model.decode(rule, [SamplingParams(seed=seed, **asked) for seed in range(samples)], draft, 3)
    outcomes = torch.tensor([(a * V + b) * V + c for a, b, c, *_ in outputs])
    exact = joint(model, SamplingParams(seed=0, **asked))
    return fit(torch.bincount(outcomes, minlength=V**3), exact)


@pytest.mark.parametrize(
    ("draft", "asked"),
    [(no_draft, SAMPLING[0]), (greedy_draft, SAMPLING[0]), (greedy_draft, SAMPLING[1]), (random_chain, SAMPLING[1])],
)
def test_three_tokens_follow_the_targets_joint_distribution(draft, asked):
    assert joint_fit(CoupledRule(), draft, asked) > FALSE_FAILURE_RATE


FEWER = 4000
"""Half the draws are enough to catch what is wrong."""


def always_the_first_child(tree, logits, queries, num_real_tokens):
    def pick(scores, nodes, drafts):
        choice = choose(scores, nodes).tolist()
        return torch.tensor([d[0] if d else c for c, d in zip(choice, drafts, strict=True)])

    return rules._walk(tree, logits, queries, num_real_tokens, pick)


def test_the_same_test_catches_accepting_the_first_child_always():
    assert joint_fit(always_the_first_child, greedy_draft, SAMPLING[0], FEWER) < FALSE_FAILURE_RATE


def test_the_same_test_catches_the_lossy_rule():
    assert joint_fit(TypicalRule(), greedy_draft, SAMPLING[0], FEWER) < FALSE_FAILURE_RATE


@pytest.mark.parametrize("position", [lambda n: n.query.num_output, lambda n: len(n.path)])
def test_the_same_test_catches_noise_drawn_at_another_position(monkeypatch, position):
    monkeypatch.setattr(NodeContext, "position", property(position))
    assert joint_fit(CoupledRule(), greedy_draft, SAMPLING[0], FEWER) < FALSE_FAILURE_RATE


# --- lossless: the tokens (a3, c2, i3) ----------------------------------------------------------------------

REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=2.0, seed=2),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, seed=3),
]


def plain(params: SamplingParams, length: int = 40) -> list[int]:
    return TableModel().decode(CoupledRule(), [params], no_draft, length)[0][0][:length]


def oracle(expected: Sequence[int]) -> Draft:
    """Trees that hold the target's next tokens among random branches."""

    def draft(output: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
        ahead = list(expected[len(output) : len(output) + rng.randint(0, 8)])
        paths = [[rng.randrange(V) for _ in range(4)] for _ in range(4)] + [ahead]
        return merge_paths(0, rng.sample(paths, len(paths)), MAX_NODES)

    return draft


@pytest.mark.parametrize("params", REQUESTS)
def test_tokens_never_depend_on_the_tree(params):
    expected = plain(params)
    drafts = [random_tree] * 6 + [random_chain, widest_tree, greedy_draft] + [oracle(expected)] * 2
    for seed, draft in enumerate(drafts):
        outputs, num_steps = TableModel().decode(CoupledRule(), [params], draft, 40, seed)
        assert outputs[0][:40] == expected
        assert draft is random_chain or num_steps < 40


@pytest.mark.parametrize("draft", [no_draft, random_tree, greedy_draft])
def test_a_seed_repeats_its_tokens_alone_and_in_any_batch(draft):
    expected = [plain(params) for params in REQUESTS]
    for seed in range(6):
        order = random.Random(seed).choices(range(len(REQUESTS)), k=1 + seed)
        outputs, _ = TableModel().decode(CoupledRule(), [REQUESTS[i] for i in order], draft, 40, seed)
        assert [output[:40] for output in outputs] == [expected[i] for i in order]


@pytest.mark.parametrize("rule", [CoupledRule(), TypicalRule()])
@pytest.mark.parametrize("asked", [{}, *SAMPLING])
def test_padding_ids_are_never_emitted_even_when_drafted_and_likeliest(rule, asked):
    model = TableModel(vocab_size=V + 4)
    model.table[:, V:] = 100.0

    def draft(output, rng):
        tokens = [V + 5, -1, V, V + 3, rng.randrange(V), V]  # V + 5 and -1 aren't even rows of the logits
        return [0, *tokens], [-1, 0, 0, 0, 0, 0, 5]

    model.row = lambda output: len(output) % 289  # padding ids have no row of their own
    outputs, _ = model.decode(rule, [SamplingParams(seed=s, **asked) for s in range(20)], draft, 20)
    assert all(0 <= token < V for output in outputs for token in output)


# --- the walk -----------------------------------------------------------------------------------------------


def verify(rule, tokens, parents, logits, num_output=0, **params) -> Accepted:
    query = VerifyQuery(SamplingParams(**params), [0] * (num_output + 1), num_output)
    return rule(TokenTree.build([tokens], [parents]), logits, [query], logits.shape[-1])[0]


def one_hot(*tokens: int) -> Tensor:
    return 10 * torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


def test_the_walk_returns_nodes_of_its_own_sequence_and_their_tokens_and_the_bonus():
    tree = TokenTree.build([[0, 3], [0, 4, 5, 6, 7], [0]], [[-1, 0], [-1, 0, 0, 2, 3], [-1]])
    logits = one_hot(9, 9, 5, 9, 6, 8, 9, 2)
    queries = [VerifyQuery(SamplingParams(), [0], 0)] * 3
    assert CoupledRule()(tree, logits, queries, V) == [
        Accepted((0,), (9,)),
        Accepted((0, 2, 3), (5, 6, 8)),
        Accepted((0,), (2,)),
    ]


def test_of_two_children_with_one_token_the_first_is_taken():
    accepted = verify(CoupledRule(), [0, 5, 5, 6], [-1, 0, 0, 1], one_hot(5, 6, 9, 7))
    assert accepted == Accepted((0, 1, 3), (5, 6, 7))


def test_an_empty_batch_gains_nothing():
    assert CoupledRule()(TokenTree.build([], []), torch.zeros(0, V), [], V) == []


def test_sizes_that_do_not_match_the_tree_are_refused():
    tree = TokenTree.roots([1, 2])
    query = VerifyQuery(SamplingParams(), [1], 0)
    with pytest.raises(ValueError, match="3 rows of logits and 2 queries don't fit a tree of 2 nodes and 2 seq"):
        CoupledRule()(tree, torch.zeros(3, V), [query] * 2, V)
    with pytest.raises(ValueError, match="1 queries"):
        CoupledRule()(tree, torch.zeros(2, V), [query], V)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1}])
@pytest.mark.parametrize("rule", [CoupledRule(), TypicalRule()])
def test_broken_logits_are_named_where_the_walk_meets_them_and_only_there(rule, params):
    nan, nothing = torch.zeros(3, V), torch.full((3, V), -math.inf)
    nan[:, 3] = math.nan
    for broken in (nan, nothing):
        accepted = verify(rule, [0, 5, 6], [-1, 0, 0], broken, num_output=4, **params)
        assert (accepted.path, accepted.tokens) == ((0,), ()) and isinstance(accepted.error, SpecdecError)
        assert "sequence 0, output position 4 hold NaN, or -inf alone" in str(accepted.error)
    unvisited = one_hot(5, 7, 0)
    unvisited[2] = math.nan
    assert verify(rule, [0, 5, 6], [-1, 0, 0], unvisited, **params).tokens == (5, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [CoupledRule(), TypicalRule()])
def test_a_gpu_draws_the_same_noise_and_makes_the_same_choices(rule):
    seeds, positions = torch.arange(16) * 2**58, torch.arange(16) * 2**27
    noise = gumbel_noise(seeds, positions, 49152)
    assert (gumbel_noise(seeds.cuda(), positions.cuda(), 49152).cpu() != noise).sum() <= 1
    asked = [*WARPED, {"temperature": 0.0}]
    queries = [VerifyQuery(SamplingParams(seed=seed, **params), [0], 0) for seed, params in enumerate(asked)]
    rng, generator = random.Random(0), torch.Generator().manual_seed(4)
    tokens = [[rng.randrange(4000) for _ in range(5)] for _ in asked]
    tree = TokenTree.build(tokens, [[-1, 0, 0, 1, 1]] * len(asked))
    logits = 3 * torch.randn(5 * len(asked), 4000, generator=generator, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # bfloat16: many ties
        expected = rule(tree, logits.to(dtype), queries, 3990)
        assert rule(tree, logits.to(dtype).cuda(), queries, 3990) == expected


# --- typical acceptance, lossy ------------------------------------------------------------------------------


def log_probs(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def test_typical_accepts_above_the_entropy_threshold_and_prefers_the_likeliest():
    # H = 1.17, so the threshold is min(0.09, 0.3 · exp(-1.17) = 0.093) = 0.09.
    root = log_probs(0.5, 0.25, 0.1, 0.08, 0.07)
    logits = torch.stack([root, *[log_probs(0.96, 0.01, 0.01, 0.01, 0.01)] * 3])
    rule = TypicalRule()
    for seed in range(10):
        asked = {"temperature": 1.0, "seed": seed}
        assert verify(rule, [0, 2, 1, 3], [-1, 0, 0, 0], logits, **asked).path == (0, 2)
        assert verify(rule, [0, 3, 2], [-1, 0, 0], logits[:3], **asked).path == (0, 2)
        rejected = verify(rule, [0, 3, 4], [-1, 0, 0], logits[:3], **asked)
        assert rejected == verify(CoupledRule(), [0, 3, 4], [-1, 0, 0], logits[:3], **asked)


def test_typical_lowers_its_threshold_as_entropy_grows():
    flat = torch.zeros(2, V, dtype=torch.float64)  # p = 1/16, above 0.3 · exp(-log 16) but below 0.09
    assert {verify(TypicalRule(), [0, 3], [-1, 0], flat, temperature=1.0, seed=s).tokens[0] for s in range(9)} == {3}
    strict = TypicalRule(delta=1.5)
    assert {verify(strict, [0, 3], [-1, 0], flat, temperature=1.0, seed=s).tokens[0] for s in range(9)} != {3}


def test_typical_is_exact_when_greedy_also_beside_rows_that_sample():
    queries = [SamplingParams(), SamplingParams(temperature=1.0, seed=4)]
    outputs, _ = TableModel().decode(TypicalRule(), queries, greedy_draft, 40)
    assert outputs[0][:40] == plain(queries[0])


def test_rules_are_made_by_name_and_labelled():
    assert {name: make_rule(name).lossless for name in RULES} == {"coupled": True, "typical": False}
    assert all(make_rule(name).name == name for name in RULES)
    assert make_rule("typical", epsilon=0.2, delta=0.1) == TypicalRule(0.2, 0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nucleus", {}, "unknown acceptance rule 'nucleus'; choose one of coupled, typical"),
        ("coupled", {"epsilon": 0.1}, "rule 'coupled' has no option 'epsilon'; it takes none"),
        ("typical", {"eps": 0.1}, "rule 'typical' has no option 'eps'; it takes epsilon, delta"),
        ("typical", {"epsilon": 0.0}, "epsilon must be above 0 and below 1, not 0.0"),
        ("typical", {"epsilon": "0.1"}, "epsilon must be above 0 and below 1, not '0.1'"),
        ("typical", {"delta": None}, "delta must be a finite number above 0, not None"),
        ("typical", {"delta": math.inf}, "delta must be a finite number above 0, not inf"),
    ],
)
def test_unknown_rules_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_rule(name, **options)
