"""Cost tables whose best node counts are known."""

from collections.abc import Callable

from specdec.engine.cost import CostKey, CostTable

KEY = CostKey("0123456789abcdef", "cpu test, 1 thread", "float64", "2.0")
NUM_NODES = (1, 2, 4, 8, 16, 32, 64)


def make_table(
    seconds: Callable[[int, int, int], float],
    num_seqs: tuple[int, ...] = (1, 4),
    contexts: tuple[int, ...] = (128, 1024),
    key: CostKey = KEY,
    model: str = "tiny",
) -> CostTable:
    """A table of a function of sequences, nodes and context."""
    times = tuple(tuple(tuple(seconds(s, n, c) for c in contexts) for n in NUM_NODES) for s in num_seqs)
    return CostTable(key, model, "specdec tune", "2026-01-01T00:00:00+00:00", num_seqs, NUM_NODES, contexts, times)


FREE = make_table(lambda s, n, c: 1.0)
"""Nodes cost nothing: draft all that is allowed."""
DEAR = make_table(lambda s, n, c: float(n) ** 3)
"""Nodes never pay, even if all were accepted."""
LINEAR = make_table(lambda s, n, c: 1.0 + 0.1 * s * n)
"""Nodes pay as long as they are mostly accepted."""
TABLES = {"none": None, "free": FREE, "dear": DEAR, "linear": LINEAR}
