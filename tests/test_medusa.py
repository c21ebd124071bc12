"""The Medusa drafter: its candidates are the heads' own, in the order that each request asks for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.drafters.heads import HeadsConfig, MedusaHeads
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.protocol import DraftQuery, DraftTarget, Observation
from specdec.errors import ConfigError
from specdec.kernels.gumbel import gumbel_noise
from specdec.params import SamplingParams
from specdec.verifier.tree import TokenTree

V, K = 11, 3
CPU = torch.device("cpu")


def permuting_heads() -> tuple[MedusaHeads, DraftTarget, list[list[int]]]:
    """Heads over a base whose hidden state is its logits; head k gives token t the logit of token perm[k][t]."""
    perms = [torch.randperm(V, generator=torch.Generator().manual_seed(k)) for k in range(K)]
    config = HeadsConfig(num_heads=K, num_layers=1, hidden_size=V, vocab_size=V, projection="own")
    heads = MedusaHeads(config)
    with torch.no_grad():
        for k, perm in enumerate(perms):
            heads.projection[k] = torch.eye(V)[perm]  # type: ignore[index]
    return heads, DraftTarget(V, V, CPU, torch.float32, lambda x: x, ""), [p.tolist() for p in perms]


def query(request_id: int, length: int, max_nodes: int = 64, temperature: float = 0.0) -> DraftQuery:
    params = SamplingParams(seed=request_id + 5, temperature=temperature)
    return DraftQuery(request_id, [3] * length, 1, max_nodes, params)


def node_tokens(tree: TokenTree, b: int) -> list[int]:
    tokens: list[int] = tree.tokens[tree.cu_nodes[b] + 1 : tree.cu_nodes[b + 1]].tolist()
    return tokens


TREE = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 1), (1, 1, 2)]


def expected_tokens(scores: Sequence[Tensor]) -> list[int]:
    ranked = [score.argsort(descending=True).tolist() for score in scores]
    return [ranked[len(choice) - 1][choice[-1]] for choice in TREE]


def test_greedy_candidates_are_top_ranks(no_int8: None) -> None:
    heads, base, perms = permuting_heads()
    drafter = MedusaDrafter(heads, base, TREE)
    hidden = torch.randn(7, V)
    drafter.observe(Observation([4, 8, 6], [3, 0, 4], hidden))
    tree = drafter.propose([query(6, 5), query(8, 5), query(4, 4)])
    assert [tree.num_nodes(b) for b in range(3)] == [9, 1, 9]
    assert tree.parents_of(0) == [-1, 0, 1, 0, 2, 1, 0, 3, 7]
    for b, last in ((0, hidden[6]), (2, hidden[2])):
        assert node_tokens(tree, b) == expected_tokens([last[perm] for perm in perms])


def test_sampled_candidates_are_coupled_to_the_target(no_int8: None) -> None:
    """Rank 0 of head k is what a target with the head's distribution chooses at output position num_output + k."""
    heads, base, perms = permuting_heads()
    drafter = MedusaDrafter(heads, base, TREE)
    hidden = torch.randn(3, V)
    drafter.observe(Observation([0, 1, 2], [1, 1, 1], hidden))
    queries = [query(0, 2, temperature=0.7), query(1, 2), query(2, 2, temperature=1.5)]
    queries = [replace(q, num_output=9 + q.request_id) for q in queries]
    tree = drafter.propose(queries)
    for b, q in enumerate(queries):
        scores = [hidden[b][perm] for perm in perms]
        if q.params.temperature:
            seeds = torch.full((K,), q.params.seed)
            noise = gumbel_noise(seeds, q.num_output + torch.arange(K), V)
            scores = [s / q.params.temperature + n for s, n in zip(scores, noise, strict=True)]
        assert node_tokens(tree, b) == expected_tokens(scores)
    alone = drafter.propose(queries[2:])
    assert node_tokens(alone, 0) == node_tokens(tree, 2), "whatever else runs"


def test_budget_takes_the_first_nodes() -> None:
    heads, base, _ = permuting_heads()
    drafter = MedusaDrafter(heads, base, TREE)
    drafter.observe(Observation([0], [3], torch.randn(3, V)))
    whole = node_tokens(drafter.propose([query(0, 4)]), 0)
    for budget in range(1, 65):
        tree = drafter.propose([query(0, 4, budget)])
        assert node_tokens(tree, 0) == whole[: budget - 1]
    assert MedusaDrafter(heads, base, TREE, max_nodes=3).choices == ((0,), (0, 0))
    assert MedusaDrafter(heads, base, TREE, max_nodes=1).choices == ()


def test_only_fresh_hidden_states_are_used() -> None:
    heads, base, _ = permuting_heads()
    drafter = MedusaDrafter(heads, base, TREE)
    drafter.observe(Observation([0], [4], torch.randn(4, V)))  # the first chunk of a prompt
    assert drafter.propose([query(0, 9)]).num_nodes(0) == 1, "the rest of the prompt lies between"
    drafter.observe(Observation([0], [5], torch.randn(5, V)))
    assert drafter.propose([query(0, 10)]).num_nodes(0) == 9
    drafter.observe(Observation([0], [2], torch.randn(2, V)))
    assert drafter.propose([query(0, 12)]).num_nodes(0) == 9, "also where a prefix came from the cache"
    drafter.forget([0, 77])
    assert drafter.propose([query(0, 12)]).num_nodes(0) == 1
    assert drafter.propose([]).num_sequences == 0


def test_tree_of_the_heads_and_default_tree() -> None:
    heads, base, _ = permuting_heads()
    default = MedusaDrafter(heads, base).choices
    assert len(default) == 15 and default[:2] == ((0,), (0, 0))
    assert max(choice[-1] for choice in MedusaDrafter(heads, base, max_nodes=64).choices) < V
    heads.config = replace(heads.config, tree=((0,), (1,)))
    assert MedusaDrafter(heads, base).choices == ((0,), (1,))
    assert MedusaDrafter(heads, base, [[2]]).choices == ((2,),)
    whole = [(rank,) for rank in range(V)] + [(0, rank) for rank in range(V)]
    heads.config = replace(heads.config, tree=tuple(whole))
    assert len(MedusaDrafter(heads, base).choices) == 2 * V, "a stored tree isn't cut"
    assert len(MedusaDrafter(heads, base, max_nodes=5).choices) == 4


def test_drafter_options_are_checked() -> None:
    heads, base, _ = permuting_heads()
    for options, match in (
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_nodes": 65}, "max_nodes"),
        ({"max_nodes": True}, "max_nodes"),
        ({"tree": [(0, 0)]}, "parent"),
        ({"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]}, "1 to 3 ranks"),
        ({"tree": [(V,)]}, f"{V + 1} candidates of {V} tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            MedusaDrafter(heads, base, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sizes"):
        MedusaDrafter(heads, replace(base, vocab_size=V + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_drafts_what_the_cpu_drafts(dtype: torch.dtype, no_int8: None) -> None:
    heads, base, _ = permuting_heads()
    hidden = torch.randn(4, V).to(torch.bfloat16)  # permuted, so exact on both
    queries = [query(0, 2, temperature=0.7), query(1, 2), query(2, 2, 5, temperature=1.5), query(3, 2, 1)]
    trees = []
    for device in ("cpu", "cuda"):
        place = torch.device(device)
        drafter = MedusaDrafter(heads.to(place, dtype), replace(base, device=place, dtype=dtype), TREE)
        drafter.observe(Observation([0, 1, 2, 3], [1, 1, 1, 1], hidden.to(place, dtype)))
        trees.append(drafter.propose(queries))
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist() and trees[0].cu_nodes == trees[1].cu_nodes
    assert trees[1].tokens.device.type == "cpu"
