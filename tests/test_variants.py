"""New sizes of batches and trees run the kernels that are there: a compilation holds up everything that is served."""

from tests.test_formats import on_hopper

NODES = 2
"""Kernels of trees: up to 32 nodes, and up to 64."""
ROW_TILES = 2
"""Kernels of products: up to 16 rows, and more."""
EXPECTED = {
    "accept._accept_kernel": NODES,
    "activation._act_mul_kernel": 1,
    "advance._advance_kernel": NODES,
    "chain.chain_kernel": 1,
    "chain.merge_kernel": 1,
    "candidates._block_kernel": 1,
    "candidates._row_kernel": 1,
    "cell._down_kernel": 1,
    "cell._up_kernel": 1,
    "commit._kv_commit_kernel": 4,  # up to 4, 16 and 64 moves; and more, which are staged
    "keep._keep_kernel": 1,
    "linear._linear_kernel": ROW_TILES,
    "moves._moves_kernel": NODES,
    "ngram._chain_kernel": NODES,
    "ngram._search_kernel": 1,
    "norm._add_rmsnorm_kernel": 1,
    "norm._rmsnorm_kernel": 2,  # hidden states; queries and keys
    "paths.paths_kernel": 1,
    "rank._block_kernel": 1,
    "rank._row_kernel": 1,
    "roots._roots_kernel": 1,
    "rope._rope_write_kernel": 1,
    "rows._tree_rows_kernel": NODES,
    "sample._block_kernel": 1,
    "sample._row_kernel": 1,
    "tree.context_kernel": 1,
    "tree.tail_kernel": 1,
    "write._kv_write_kernel": 1,
}
"""Of one model, over 1 to 64 sequences, nodes, paths and rows; of attention, over 1 to 4 nodes."""


def test_sizes_of_batches_and_trees_share_their_kernels() -> None:
    [counts] = on_hopper("from tests import variants; print(variants.count())")
    assert counts == EXPECTED
