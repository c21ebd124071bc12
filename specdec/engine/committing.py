"""Commits what a step planned by the host accepted: moves keys and values, counts tokens, tells the drafter."""

from collections.abc import Sequence

import torch

from specdec.cache.pages import KVPages
from specdec.drafters.protocol import Drafter, Observation
from specdec.engine.packing import Packed
from specdec.engine.scheduler import Plan, Scheduler
from specdec.models.batch import slot
from specdec.verifier.rules import Accepted


def commit(
    plan: Plan,
    packed: Packed,
    accepted: Sequence[Accepted],
    hidden: torch.Tensor,
    pages: KVPages,
    scheduler: Scheduler,
    drafter: Drafter,
) -> None:
    """Make the accepted path of each item contiguous in the cache, and tell the drafter what was committed.

    Args:
        plan: the step.
        packed: where its rows lie in the batch.
        accepted: what each of its decoding items gained, in order.
        hidden: [N, H], of all rows.
        pages: the target's keys and values.
        scheduler: frees the slots of rejected nodes.
        drafter: is told.
    """
    src: list[int] = []
    dst: list[int] = []
    rows: list[int] = []
    counts: list[int] = []
    results = iter(accepted)
    for item, start in zip(plan.items, packed.starts, strict=True):
        path = next(results).path if item.max_nodes else ()
        table, root = item.request.block_table, item.request.num_computed + item.num_causal  # key of the root
        moves = [(node, depth) for depth, node in enumerate(path) if node != depth]
        src += [slot(table, root + node, pages.block_size) for node, _ in moves]
        dst += [slot(table, root + depth, pages.block_size) for _, depth in moves]
        rows += [*range(start, start + item.num_causal), *(start + item.num_causal + node for node in path)]
        counts.append(item.num_causal + len(path))
        item.request.num_computed += counts[-1]
        scheduler.trim(item.request)
    pages.commit(src, dst)
    seen = hidden[torch.tensor(rows, device=hidden.device)] if drafter.reads_hidden else None
    drafter.observe(Observation([item.request.id for item in plan.items], counts, seen))
