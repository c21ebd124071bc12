"""The kernels between two forwards: choice, walk, commit's moves, histories, prompt lookup, the next tree's rows.

Each Triton kernel equals its torch reference exactly, and each reference equals the host code that it stands for.
"""

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specdec.drafters.ngram import NGramIndex, continuation
from specdec.kernels import accept, advance, keep, moves, ngram, roots, rows, sample
from specdec.kernels.gpu import accept as gpu_accept
from specdec.kernels.gpu import advance as gpu_advance
from specdec.kernels.gpu import keep as gpu_keep
from specdec.kernels.gpu import moves as gpu_moves
from specdec.kernels.gpu import ngram as gpu_ngram
from specdec.kernels.gpu import roots as gpu_roots
from specdec.kernels.gpu import rows as gpu_rows
from specdec.kernels.gpu import sample as gpu_sample
from specdec.kernels.gumbel import gumbel_noise
from specdec.models.batch import slot
from specdec.params import SamplingParams
from specdec.verifier import rules
from specdec.verifier.processors import NodeContext, VerifyQuery, process_logits
from specdec.verifier.rules import CoupledRule
from specdec.verifier.tree import TokenTree, chain_parents
from tests.kernels import DEVICE, DTYPES, ON_GPU

pytestmark = pytest.mark.gpu if ON_GPU else []


def choose_by_turns(*args: object) -> Tensor:
    """The kernel as many rows take it: a program has several blocks."""
    with patch.object(gpu_sample, "_PROGRAMS", 1):
        return gpu_sample.choose(*args)


CHOOSE = pytest.mark.parametrize(
    "choose", [sample.choose, gpu_sample.choose, choose_by_turns], ids=["torch", "triton", "triton by turns"]
)
ACCEPT = pytest.mark.parametrize("walk", [accept.accept, gpu_accept.accept], ids=["torch", "triton"])
ROWS = pytest.mark.parametrize("tree_rows", [rows.tree_rows, gpu_rows.tree_rows], ids=["torch", "triton"])
MOVES = pytest.mark.parametrize("find_moves", [moves.moves, gpu_moves.moves], ids=["torch", "triton"])
ADVANCE = pytest.mark.parametrize("append", [advance.advance, gpu_advance.advance], ids=["torch", "triton"])
NGRAM = pytest.mark.parametrize("lookup", [ngram.ngram_chain, gpu_ngram.ngram_chain], ids=["torch", "triton"])
KEEP = pytest.mark.parametrize("keep_last", [keep.keep, gpu_keep.keep], ids=["torch", "triton"])
ROOTS = pytest.mark.parametrize("begin", [roots.roots, gpu_roots.roots], ids=["torch", "triton"])
INF, NAN = float("inf"), float("nan")


def put(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# --- the choice ---------------------------------------------------------------------------------------------


def contexts(temperatures: list[float], rows_per_sequence: int) -> list[NodeContext]:
    """Nodes of each sequence, at output positions that differ; seeds of one word and of two."""
    nodes = []
    for b, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature, seed=b if b % 2 else 2**63 - 1 - b)
        query = VerifyQuery(params, [1] * (b + 1), b)
        nodes += [NodeContext(b, query, (1,) * depth) for depth in range(rows_per_sequence)]
    return nodes


def inputs(nodes: list[NodeContext], rows_per_sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions as the kernel takes them."""
    firsts = [node.params for node in nodes[::rows_per_sequence]]
    temperature = put([p.temperature for p in firsts], torch.float32)
    return temperature, put([p.seed for p in firsts]), put([node.position for node in nodes])


@CHOOSE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "real", "per_sequence"), [(2500, 2500, 1), (2051, 2049, 2), (97, 90, 3), (4, 1, 1)])
def test_choices_are_those_of_the_rule(choose, dtype, vocab, real, per_sequence):
    nodes = contexts([0.0, 0.3, 1.0, 2.0, 1e-7], per_sequence)
    logits = (3 * torch.randn(len(nodes), vocab, generator=torch.Generator().manual_seed(vocab))).to(DEVICE, dtype)
    logits[:, real:] = 100
    chosen = choose(logits, *inputs(nodes, per_sequence), real, per_sequence)
    assert chosen.tolist() == rules.choose(process_logits(logits, nodes, real), nodes).tolist()
    assert real == 1 or len(set(chosen.tolist())) > 1


@CHOOSE
def test_the_noise_is_the_same_to_the_last_bit(choose):
    """Logits that cancel the noise tie all ids, and id 0 wins, only if every bit is right."""
    seeds, positions = put([7, 2**62 + 5, 2**63 - 1]), put([0, 17, 2**32 - 1])
    logits = -gumbel_noise(seeds, positions, 2500)
    assert choose(logits, put([1.0] * 3, torch.float32), seeds, positions, 2500).tolist() == [0, 0, 0]
    logits[1, 2300] = logits[1, 2300].nextafter(put(INF, torch.float32))
    assert choose(logits, put([1.0] * 3, torch.float32), seeds, positions, 2500).tolist() == [0, 2300, 0]


@CHOOSE
def test_division_is_correctly_rounded(choose):
    """Scores so large that the noise is lost: whether two neighbours tie, for id 0, is up to a quotient's last bit."""
    temperature = put([2.3, 2.7, 3.0, 3.3], torch.float32)
    spread = torch.randint(0, 2**28, (4, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    upper = (2**30 * temperature.unsqueeze(1) + spread).flatten()  # quotients from 2^30 on, where noise is below an ulp
    logits = torch.stack([upper.nextafter(torch.zeros_like(upper)), upper], 1)
    chosen = choose(logits, temperature, put([1, 2, 3, 4]), put(list(range(48))), 2, 12)
    quotient = logits.double() / temperature.double().repeat_interleave(12).unsqueeze(1)
    assert chosen.tolist() == quotient.float().max(-1).indices.tolist()
    assert set(chosen.tolist()) == {0, 1}


@CHOOSE
def test_ties_go_to_the_lowest_id_within_and_across_blocks(choose):
    logits = torch.zeros(3, 2500, device=DEVICE)
    logits[0, [77, 78, 2400]] = 1
    logits[1, [1023, 1024]] = 1
    logits[2, [30, 2400]] = INF
    greedy = [put([0.0] * 3, torch.float32), put([0] * 3), put([0] * 3)]
    assert choose(logits, *greedy, 2500).tolist() == [77, 1023, 30]


@CHOOSE
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_hold_nan_or_minus_infinity_alone_have_no_choice(choose, temperature):
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 1400] = NAN
    logits[1, 0] = NAN
    logits[1, 1] = INF
    logits[2] = -INF
    logits[3] = -INF
    logits[3, 1100] = -5
    logits[4, 1450:] = NAN  # padding
    logits[5] = NAN
    chosen = choose(logits, put([temperature] * 6, torch.float32), put([3] * 6), put(list(range(6))), 1450).tolist()
    assert [chosen[row] for row in (0, 1, 2, 3, 5)] == [-1, -1, -1, 1100, -1]
    assert 0 <= chosen[4] < 1450


@CHOOSE
def test_rows_may_be_a_view_of_a_wider_tensor(choose):
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    arguments = (put([1.0] * 4, torch.float32), put([5] * 4), put([0, 1, 2, 3]), 100)
    assert torch.equal(choose(wide[:, 100:200], *arguments), choose(wide[:, 100:200].contiguous(), *arguments))


@CHOOSE
def test_sizes_that_do_not_fit_are_refused(choose):
    logits, temperature, seeds, positions = torch.zeros(4, 9), torch.zeros(2), put([0, 0]), put([0] * 4)
    with pytest.raises(ValueError, match="4 rows of logits don't fit 2 temperatures and 2 seeds of 1 rows"):
        choose(logits, temperature, seeds, positions, 9)
    for real in (0, 10):
        with pytest.raises(ValueError, match=f"from 1 to 9, not {real}"):
            choose(logits, temperature, seeds, positions, real, 2)


def test_the_kernel_refuses_columns():
    with pytest.raises(ValueError, match="must be contiguous, not of stride 2"):
        gpu_sample.choose(torch.zeros(9, 2).t(), torch.zeros(2), put([0, 0]), put([0, 0]), 9)


# --- trees --------------------------------------------------------------------------------------------------

Forest = tuple[list[list[int]], list[list[int]]]
SIZES = [(1, [1, 1, 0]), (5, [5, 0, 1, 3, 4]), (16, [16, 9, 0, 16]), (64, [64, 64, 17])]


def forest(num_nodes: list[int], seed: int) -> Forest:
    """Random trees over three token ids, so that siblings often hold the same one; the second one is a chain."""
    rng = random.Random(seed)
    parents = [[-1 if i == 0 else rng.randrange(max(0, i - 4), i) for i in range(count)] for count in num_nodes]
    parents[1] = chain_parents(num_nodes[1])
    return [[rng.randrange(3) for _ in range(count)] for count in num_nodes], parents


def padded(lists: list[list[int]], width: int, filler: int) -> Tensor:
    return put([values + [filler] * (width - len(values)) for values in lists])


def accepted_by_rule(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], list[int]]:
    """Path and tokens of the host's walk, over logits that leave one token to choose at each node."""
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 3).float()
    [won] = CoupledRule()(TokenTree.build([tokens], [parents]), logits, [VerifyQuery(SamplingParams(), [0], 0)], 3)
    return list(won.path), list(won.tokens)


def walked(
    walk: Callable[..., tuple[Tensor, Tensor]], tokens: Tensor, parents: Tensor, num_nodes: list[int], choices: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[bool]]:
    """Path, tokens, how many, and whether the walk ended at a leaf; the counts are checked."""
    width = tokens.shape[1]
    out = torch.full((len(tokens), width + 3), -7, device=DEVICE)
    path, num_accepted = walk(tokens, parents, put(num_nodes, torch.int32), choices, out)
    assert out[:, width + 1].tolist() == num_accepted.tolist() and out[:, width + 2].tolist() == num_nodes
    assert set(out[:, width].tolist()) <= {0, 1}
    return path, out[:, :width], num_accepted, out[:, width].bool().tolist()


@ACCEPT
@pytest.mark.parametrize(("width", "num_nodes"), SIZES)
def test_the_walk_is_the_rules(walk, width, num_nodes):
    for seed in range(4):
        tokens, parents = forest(num_nodes, seed)
        rng = random.Random(seed)
        choices = [[rng.choice([1, 1, 0, 2]) for _ in nodes] for nodes in tokens]
        tokens = [[rng.choice([token, 1]) for token in nodes] for nodes in tokens]
        path, emitted, num_accepted, leaf = walked(
            walk, padded(tokens, width, 1), padded(parents, width, 0), num_nodes, padded(choices, width, 1)
        )
        assert num_accepted.dtype == torch.int32
        for b, count in enumerate(num_nodes):
            won = accepted_by_rule(tokens[b], parents[b], choices[b]) if count else ([], [])
            assert num_accepted[b] == len(won[0])
            assert path[b].tolist() == won[0] + [-1] * (width - len(won[0]))
            assert emitted[b].tolist() == won[1] + [-1] * (width - len(won[1]))
            assert leaf[b] == (not won[0] or won[0][-1] not in parents[b])


@ACCEPT
def test_no_choice_is_emitted_and_ends_the_walk_even_at_a_child_that_holds_it(walk):
    tokens, parents = put([[5, 6, -1, 7], [5, 6, 7, 8]]), put([[-1, 0, 1, 2], [-1, 0, 1, 2]])
    path, emitted, num_accepted, leaf = walked(walk, tokens, parents, [4, 4], put([[6, -1, 7, 8], [-1, 7, 8, 9]]))
    assert path.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    assert emitted.tolist() == [[6, -1, -1, -1], [-1, -1, -1, -1]]
    assert num_accepted.tolist() == [2, 1] and leaf == [False, False]


@ACCEPT
def test_a_walk_through_a_whole_chain_takes_every_node(walk):
    tokens, parents = put([list(range(64))] * 2), put([chain_parents(64)]).expand(2, -1)  # one row for all
    path, emitted, num_accepted, leaf = walked(walk, tokens, parents, [64, 3], tokens + 1)
    assert (path[0].tolist(), emitted[0].tolist(), leaf) == (list(range(64)), list(range(1, 65)), [True, True])
    assert num_accepted.tolist() == [64, 3]


@ACCEPT
def test_shapes_that_do_not_fit_the_walk_are_refused(walk):
    one, two = put([1], torch.int32), put([[0, 1]])
    with pytest.raises(ValueError, match="tokens, parents and choices must be"):
        walk(two, put([[-1]]), one, two, put([[0] * 5]))
    with pytest.raises(ValueError, match=r"out must be \[B, n \+ 3\] = \[1, 5\]"):
        walk(two, two, one, two, put([[0] * 4]))


@ROWS
@pytest.mark.parametrize(("width", "num_nodes"), SIZES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_rows_are_those_of_the_trees_and_the_block_table(tree_rows, width, num_nodes, block_size):
    _, parents = forest(num_nodes, 0)
    lengths = [1, 30, 100, 47, 64][: len(num_nodes)]
    table = torch.randperm(len(lengths) * 12, generator=torch.Generator().manual_seed(0)).view(-1, 12).int()
    prompts, most = [length - length // 2 for length in lengths], [64, 3, 64, 2, 64][: len(num_nodes)]
    nodes = put(num_nodes, torch.int32), put(most, torch.int32)
    rows = tree_rows(padded(parents, width, 0), *nodes, put(lengths), put(prompts), table.to(DEVICE), block_size)
    positions, slots, ancestors = rows.positions, rows.slots, rows.ancestors
    left = [min(count, limit) for count, limit in zip(num_nodes, most, strict=True)]
    assert rows.num_nodes.tolist() == left and rows.contexts.tolist() == [length - 1 for length in lengths]
    assert rows.num_nodes.dtype == rows.contexts.dtype == torch.int32
    for b, count in enumerate(left):
        tree = TokenTree.build([[0] * max(count, 1)], [parents[b][:count] or [-1]])
        context, padding = lengths[b] - 1, width - count
        keys = range(context, context + count)
        assert positions[b].tolist() == [context + d for d in tree.depth.tolist()[:count]] + [0] * padding
        assert (rows.outputs[b, :count] == positions[b, :count] + 1 - prompts[b]).all()
        assert slots[b].tolist() == [slot(table[b].tolist(), key, block_size) for key in keys] + [-1] * padding
        assert ancestors[b].tolist() == tree.ancestors.tolist()[:count] + [0] * padding


@ROWS
def test_keys_behind_the_block_table_have_no_slot(tree_rows):
    """The parents of all sequences may be one row."""
    table, four = put([[3, 5], [1, 2]], torch.int32), put([4, 4], torch.int32)
    parents = put([chain_parents(4)]).expand(2, -1)
    rows = tree_rows(parents, four, four, put([31, 7]), put([2, 2]), table, 16)
    assert rows.slots.tolist() == [[94, 95, -1, -1], [22, 23, 24, 25]]


@ROWS
def test_shapes_that_do_not_fit_the_rows_are_refused(tree_rows):
    one = put([1], torch.int32)
    with pytest.raises(ValueError, match="blocks differ"):
        tree_rows(put([[-1]]), one, one, put([1, 1]), put([1]), put([[0]], torch.int32), 16)
    with pytest.raises(ValueError, match="blocks differ"):
        tree_rows(put([[-1]]), one, one, put([1]), put([1, 1]), put([[0]], torch.int32), 16)
    with pytest.raises(ValueError, match="at most 64 nodes, not 65"):
        tree_rows(put([chain_parents(65)]), one, one, put([1]), put([1]), put([[0]], torch.int32), 16)


@MOVES
def test_accepted_nodes_move_to_where_plain_decoding_would_have_written_them(find_moves):
    path = put([[0, 2, 5, 6], [0, 1, 2, -1], [-1] * 4, [0, 1, 3, -1]])
    num_accepted, lengths = put([4, 3, 0, 3], torch.int32), put([15, 7, 0, 31])
    table = put([[2, 9, 4], [1, 7, 8], [0, 0, 0], [5, 6, 3]], torch.int32)
    src, dst = find_moves(path, num_accepted, lengths, table, 16)
    assert src.tolist() == [[-1, 144, 147, 148], [-1] * 4, [-1] * 4, [-1, -1, 49, -1]]
    assert dst.tolist() == [[-1, 47, 144, 145], [-1] * 4, [-1] * 4, [-1, -1, 48, -1]]


@MOVES
def test_nodes_that_had_no_slot_do_not_move(find_moves):
    src, dst = find_moves(put([[0, 2, 3]]), put([3], torch.int32), put([14]), put([[4]], torch.int32), 16)
    assert (src.tolist(), dst.tolist()) == ([[-1, 79, -1]], [[-1, 78, -1]])


# --- histories ----------------------------------------------------------------------------------------------


@ADVANCE
def test_emitted_tokens_are_appended_and_a_full_history_stays_within_its_row(append):
    history = torch.arange(40, device=DEVICE, dtype=torch.int32).view(4, 10)
    before, lengths = history.clone(), put([3, 0, 9, 10])
    append(history, lengths, put([[50, 51, 52], [53, 54, 55], [56, 57, 58], [59, -1, -1]]), put([2, 0, 3, 1]).int())
    assert lengths.tolist() == [5, 0, 10, 10]
    before[0, 3:5] = put([50, 51])
    before[2, 9] = 56
    assert torch.equal(history, before)


@ADVANCE
def test_no_choice_is_stored_as_a_token_id(append):
    history, lengths = put([[7, 8, 9]], torch.int32), put([1])
    append(history, lengths, put([[-1, -1]]), put([1], torch.int32))
    assert (history.tolist(), lengths.tolist()) == ([[7, 0, 9]], [2])


@ADVANCE
def test_what_cannot_be_changed_in_place_is_refused(append):
    emitted, one = put([[1], [1]]), put([1, 1], torch.int32)
    with pytest.raises(ValueError, match="must be contiguous"):
        append(put([[1, 2], [3, 4]], torch.int32).t(), put([1, 1]), emitted, one)
    with pytest.raises(ValueError, match="differ"):
        append(put([[1, 2], [3, 4]], torch.int32), put([1]), emitted, one)


def chain_by_index(tokens: list[int], num_nodes: int, longest: int, shortest: int) -> tuple[list[int], int]:
    """The chain and its match length by the host's index."""
    index = NGramIndex(range(longest, shortest - 1, -1))
    index.extend(tokens)
    match = index.longest_match(tokens)
    if not match:
        return tokens[-1:], 0
    return tokens[-1:] + continuation(tokens, next(index.occurrences(tokens, match)), num_nodes - 1), match


def check_lookup(lookup, sequences: list[list[int]], capacity: int, num_nodes: int, longest: int, shortest: int):
    # What stands behind a sequence's end looks like more of it.
    history = padded([tokens + tokens[: capacity - len(tokens)] for tokens in sequences], capacity, 0).int()
    tokens, parents, count, match = lookup(history, put([len(s) for s in sequences]), num_nodes, longest, shortest)
    assert (tokens.dtype, parents.dtype, count.dtype, match.dtype) == (torch.int64,) * 2 + (torch.int32,) * 2
    assert parents.tolist() == [chain_parents(num_nodes)] * len(sequences)
    for b, sequence in enumerate(sequences):
        chain, matched = chain_by_index(sequence, num_nodes, longest, shortest) if sequence else ([], 0)
        assert tokens[b].tolist() == chain + [0] * (num_nodes - len(chain))
        assert (count[b], match[b]) == (len(chain), matched)
    return match


@NGRAM
@pytest.mark.parametrize(("vocab", "longest", "shortest"), [(2, 8, 1), (3, 4, 1), (5, 3, 2), (40, 4, 1), (2, 8, 5)])
def test_chains_are_those_of_the_index(lookup, vocab, longest, shortest):
    rng = random.Random(vocab)
    lengths = [0, 1, 2, 3, 100, 64, *(rng.randrange(1, 60) for _ in range(10))]
    sequences = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    for num_nodes in (1, 9):
        match = check_lookup(lookup, sequences, 100, num_nodes, longest, shortest)
    assert match.any()


@NGRAM
def test_a_match_is_found_in_every_block_of_a_long_history(lookup):
    fresh = list(range(100, 2700))
    sequences = [[*fresh[:at], 1, 2, 3, *fresh[at:], 2, 3] for at in (0, 1020, 1021, 1022, 1024, 2047, 2598)]
    recent = [*fresh[:5], 7, 8, *fresh[5:1500], 8, 9, *fresh[1500:], 7, 8]  # the longer one, though older
    match = check_lookup(lookup, [*sequences, recent, fresh, [4] * 2604], 2700, 12, 4, 1)
    assert match.tolist() == [2] * 8 + [0, 4]


@NGRAM
@pytest.mark.parametrize(
    ("bad", "message"),
    [((0, 4, 1), "num_nodes_max"), ((65, 4, 1), "num_nodes_max"), ((8, 9, 1), "lookups"), ((8, 2, 3), "lookups")],
)
def test_bounds_of_the_lookup(lookup, bad, message):
    with pytest.raises(ValueError, match=message):
        lookup(put([[1]], torch.int32), put([1]), *bad)
    with pytest.raises(ValueError, match=r"\[S, L\]"):
        lookup(put([[1]], torch.int32), put([1, 2]), 8, 4, 1)


# --- a step -------------------------------------------------------------------------------------------------

TORCH = (ngram.ngram_chain, rows.tree_rows, sample.choose, accept.accept, moves.moves, advance.advance)
TRITON = (
    gpu_ngram.ngram_chain,
    gpu_rows.tree_rows,
    gpu_sample.choose,
    gpu_accept.accept,
    gpu_moves.moves,
    gpu_advance.advance,
)


def captured(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """`run` as one CUDA graph, replayed at each call; without a GPU, `run` itself."""
    if not ON_GPU:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def test_a_step_is_captured_once_and_replayed_with_what_changed():
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 3, (4, 256), dtype=torch.int32, generator=generator).to(DEVICE)
    lengths, table = put([50, 0, 9, 120]), put([list(range(b * 20, b * 20 + 20)) for b in range(4)], torch.int32)
    logits = torch.randn(32, 3, generator=generator).to(DEVICE)
    settings = (put([0.0, 1.0, 0.7, 2.0], torch.float32), put([1, 2, 3, 4]))
    most, prompts = put([8, 8, 3, 8], torch.int32), put([20, 3, 9, 5])

    def step(kernels: tuple, history: Tensor, lengths: Tensor) -> list[Tensor]:
        propose, lay_out, choose, walk, find_moves, append = kernels
        tokens, parents, num_nodes, match = propose(history, lengths, 8, 4, 1)
        rows = lay_out(parents, num_nodes, most, lengths, prompts, table, 16)
        choices = choose(logits, *settings, rows.outputs.flatten(), 3, 8).view(4, 8)
        out = torch.empty(4, 11, dtype=torch.int64, device=DEVICE)
        path, num_accepted = walk(tokens, parents, rows.num_nodes, choices, out)
        src, dst = find_moves(path, num_accepted, lengths, table, 16)
        append(history, lengths, out[:, :8], num_accepted)
        laid = [rows.num_nodes, rows.contexts, rows.positions, rows.outputs, rows.slots, rows.ancestors]
        return [tokens, match, *laid, path, out, num_accepted, src, dst]

    want_history, want_lengths = history.clone(), lengths.clone()
    step(TRITON, history.clone(), lengths.clone())  # compiles, which a capture must not
    replay = captured(lambda: step(TRITON, history, lengths))
    for _ in range(5 if ON_GPU else 2):
        logits.copy_(torch.randn(32, 3, generator=generator))
        got, want = replay(), step(TORCH, want_history, want_lengths)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(history, want_history) and torch.equal(lengths, want_lengths)
    assert lengths[1] == 0 and lengths.sum() > 179 + 3 * 2


# ---- what heads need from step to step ----


@KEEP
@pytest.mark.parametrize("size", [5, 1500])
def test_the_hidden_state_of_the_last_accepted_node_is_kept(keep_last, size):
    hidden = torch.randn(4, 3, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    path, num_accepted = put([[0, 2, -1], [0, -1, -1], [-1] * 3, [-1] * 3]), put([2, 1, 0, 0], torch.int32)
    kept, known = torch.full((4, size), 9.0, device=DEVICE), put([0, 0, 1, 0], torch.bool)
    keep_last(hidden, path, num_accepted, kept, known)
    assert torch.equal(kept, torch.stack([hidden[0, 2], hidden[1, 0], *torch.full_like(kept[2:], 9.0)]))
    assert known.tolist() == [True, True, True, False]


@KEEP
def test_shapes_that_cannot_be_kept_are_refused(keep_last):
    hidden, path, kept = torch.zeros(2, 3, 4, device=DEVICE), put([[-1] * 3] * 2), torch.zeros(2, 4, device=DEVICE)
    none, known = put([0, 0], torch.int32), put([0, 0], torch.bool)
    with pytest.raises(ValueError, match="don't fit each other"):
        keep_last(hidden, path, none, kept[:, :3], known)
    with pytest.raises(ValueError, match="don't fit each other"):
        keep_last(hidden, path, none, kept, known[:1])
    with pytest.raises(ValueError, match="must be contiguous"):
        keep_last(hidden, path, none, torch.zeros(4, 2, device=DEVICE).T, known)


@ROOTS
@pytest.mark.parametrize("num_nodes", [1, 6])
def test_roots_are_the_last_tokens(begin, num_nodes):
    """The third sequence has no hidden state, the last one is inactive."""
    history = put([[5, 6, 7, 0], [8, 9, 0, 0], [4, 3, 2, 1], [3, 0, 0, 0]], torch.int32)
    lengths, prompts = put([3, 2, 4, 0]), put([1, 2, 2, 2])
    found, positions, sizes = begin(history, lengths, prompts, put([1, 1, 0, 1], torch.bool), num_nodes, 9)
    assert found.shape == (4, 9) and found[:3, 0].tolist() == [7, 9, 1] and found[3, 0] in (3, 0)
    assert positions[:3].tolist() == [2, 0, 2] and positions[3] >= 0
    assert sizes.tolist() == [num_nodes, num_nodes, 1, 0]
    assert (found.dtype, positions.dtype, sizes.dtype) == (torch.int64, torch.int64, torch.int32)
    with pytest.raises(ValueError, match="sizes of history"):
        begin(history, lengths[:3], prompts, put([1] * 4, torch.bool), num_nodes, 9)
