"""The token tree: building, ancestor masks, merging paths, refusals."""

import pytest
import torch

from specdec.verifier.tree import MAX_NODES, TokenTree, chain_parents, merge_paths


def test_a_ragged_batch_is_flat_with_per_sequence_parents_depths_and_ancestors():
    tree = TokenTree.build([[5, 6, 7, 8], [9], [1, 2]], [[-1, 0, 0, 1], [-1], [-1, 0]])
    assert tree.num_sequences == 3
    assert [tree.num_nodes(b) for b in range(3)] == [4, 1, 2]
    assert tree.cu_nodes == (0, 4, 5, 7)
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 1, -1, -1, 0]
    assert tree.depth.tolist() == [0, 1, 1, 2, 0, 0, 1]
    assert tree.ancestors.tolist() == [0b1, 0b11, 0b101, 0b1011, 0b1, 0b1, 0b11]


def test_node_63_sets_the_sign_bit():
    tree = TokenTree.build([list(range(MAX_NODES))], [chain_parents(MAX_NODES)])
    assert tree.ancestors[62].item() == 2**63 - 1
    assert tree.ancestors[63].item() == -1  # all 64 bits
    wide = TokenTree.build([list(range(MAX_NODES))], [[-1] + [0] * (MAX_NODES - 1)])
    assert wide.ancestors[63].item() == 1 - 2**63  # bits 63 and 0


def test_an_empty_batch_is_a_tree():
    tree = TokenTree.build([], [])
    assert (tree.num_sequences, tree.tokens.shape, tree.cu_nodes) == (0, (0,), (0,))


def test_roots_are_plain_decoding():
    tree = TokenTree.roots([3, 4])
    assert tree.tokens.tolist() == [3, 4]
    assert tree.parents.tolist() == [-1, -1]
    assert tree.cu_nodes == (0, 1, 2)


def test_chain_parents():
    assert chain_parents(1) == [-1]
    assert chain_parents(4) == [-1, 0, 1, 2]


def test_merged_paths_share_their_prefixes():
    tokens, parents = merge_paths(9, [[1, 2, 3], [1, 2, 4], [5], [1, 2]], max_nodes=64)
    assert tokens == [9, 1, 2, 3, 4, 5]
    assert parents == [-1, 0, 1, 2, 2, 0]


def test_merging_stops_at_the_node_budget_but_still_walks_existing_nodes():
    tokens, parents = merge_paths(9, [[1, 2, 3], [1, 4], [1, 2, 5]], max_nodes=3)
    assert (tokens, parents) == ([9, 1, 2], [-1, 0, 1])
    assert merge_paths(9, [[1, 2]], max_nodes=1) == ([9], [-1])


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "sequence 1 has 0 tokens"),
        ([1, 2], [-1], "sequence 1 has 2 tokens and 1 parents"),
        (list(range(65)), chain_parents(65), "sequence 1 has 65 tokens"),
        ([1, 2], [0, 0], "sequence 1, node 0: parent 0"),
        ([1, 2], [-1, 1], "sequence 1, node 1: parent 1"),
        ([1, 2], [-1, -1], "sequence 1, node 1: parent -1"),
        ([1, 2, 3], [-1, 2, 0], "sequence 1, node 1: parent 2"),
    ],
)
def test_what_is_no_tree_is_refused_by_sequence_and_node(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.build([[1], tokens], [[-1], parents])


def test_token_and_parent_lists_must_match_in_number():
    with pytest.raises(ValueError):
        TokenTree.build([[1], [2]], [[-1]])


def test_trees_of_several_batches_stand_behind_each_other() -> None:
    one = TokenTree.build([[1, 2, 3], [4]], [[-1, 0, 0], [-1]], ["a", "b", "a", "a"])
    other = TokenTree.build([[5, 6]], [[-1, 0]], ["b", "b"])
    joined = TokenTree.join([TokenTree.build([], []), one, other])
    want = TokenTree.build([[1, 2, 3], [4], [5, 6]], [[-1, 0, 0], [-1], [-1, 0]], ["a", "b", "a", "a", "b", "b"])
    assert (joined.cu_nodes, joined.proposers) == (want.cu_nodes, want.proposers)
    for name in ("tokens", "parents", "depth", "ancestors"):
        assert torch.equal(getattr(joined, name), getattr(want, name)), name


def test_proposers_are_named_for_all_nodes_or_none() -> None:
    with pytest.raises(ValueError, match="1 proposers are given for 2 nodes"):
        TokenTree.build([[1, 2]], [[-1, 0]], ["a"])
    named, nameless = TokenTree.build([[1, 2]], [[-1, 0]], ["a", "b"]), TokenTree.roots([3])
    assert TokenTree.join([named, nameless]).proposers == TokenTree.join([nameless, named]).proposers == ()


def test_a_tree_that_was_built_is_one() -> None:
    wide = [-1] + [0] * (MAX_NODES - 1)
    for parents in ([], [[-1]], [[-1, 0, 0, 1], [-1], [-1, 0]], [chain_parents(MAX_NODES), wide]):
        TokenTree.build([[1] * len(p) for p in parents], parents).check()
