"""Trees of every size from what was measured on held-out answers, and the size that is fastest on a device."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from specdec.drafters.choices import Choice, best_first_choices, most_accepted_choices
from specdec.drafters.draft_heads import DraftHeads
from specdec.drafters.int8 import HostHeads
from specdec.errors import ConfigError
from specdec.training.accuracies import JointRanks, accuracies_of, decoding_stops, path_counts, replayed_tau

_WARMUPS, _TIMED = 2, 7
_REPLAYS = 4


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The best tree of each size; each is the start of the next.

    Args:
        choices: of the largest tree, best first.
        taus: tokens expected of a forward with n nodes, root and bonus token included, at index n - 1.
    """

    choices: list[Choice]
    taus: list[float]

    @property
    def chances(self) -> list[float]:
        """How likely each of the choices is accepted."""
        return [after - before for before, after in pairwise(self.taus)]

    def tau(self, num_nodes: int) -> float:
        """Return the tokens expected of a tree of that size, or of the largest one if it is smaller."""
        return self.taus[min(num_nodes, len(self.taus)) - 1]


def trees_from_ranks(ranks: Tensor, num_ranks: int, num_nodes: int) -> TreeSizes:
    """Return the trees that are accepted deepest on the positions measured.

    Args:
        ranks: [N, K], as `specdec.training.accuracies.JointRanks.ranks`.
        num_ranks: candidates of each head.
        num_nodes: of the largest tree, root included.
    """
    counts = path_counts(ranks)
    choices = most_accepted_choices(counts, accuracies_of(ranks, num_ranks), num_nodes)
    return _sizes(choices, [counts[choice] / len(ranks) for choice in choices])


def trees_from_replay(joint: JointRanks, num_ranks: int, num_nodes: int) -> TreeSizes:
    """Return the trees that are accepted deepest where greedy decoding stops, which depends on the tree itself.

    It begins with the trees for all positions. Then those positions count at which decoding with the last tree stops,
    a few times over; the tree that needs the fewest forwards is taken.

    Args:
        joint: from `specdec.training.accuracies.joint_ranks`.
        num_ranks: candidates of each head.
        num_nodes: of the largest tree, root included.
    """
    tried = [trees_from_ranks(joint.ranks, num_ranks, num_nodes)]
    for _ in range(_REPLAYS):
        stops = decoding_stops(joint, tried[-1].choices)
        tried.append(trees_from_ranks(joint.rows[stops], num_ranks, num_nodes))
    return max(tried[1:], key=lambda sizes: replayed_tau(joint, sizes.choices))


def trees_from_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: int) -> TreeSizes:
    """Return the trees with the most expected tokens if the heads were right or wrong independently of each other.

    Args:
        accuracies: [K][ranks], as for `best_first_choices`.
        num_nodes: of the largest tree, root included.

    Raises:
        ConfigError: a value is out of bounds.
    """
    choices = best_first_choices(accuracies, num_nodes)
    return _sizes(choices, [prod(accuracies[k][rank] for k, rank in enumerate(choice)) for choice in choices])


def read_accuracies(path: Path) -> list[list[float]]:
    """Read rank accuracies: a JSON list of heads, each chances by rank, or what `specdec tree --json` printed.

    Raises:
        ConfigError: the file can't be read or holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the accuracies in {path} can't be read: {error}") from error
    table = raw.get("accuracies") if isinstance(raw, dict) else raw
    if not isinstance(table, list) or not table or not all(_is_row(row) for row in table):
        raise ConfigError(f"{path}: accuracies must be a list of heads, each a list of chances from 0 to 1 by rank")
    return table


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) > 0 and all(type(x) in (int, float) and 0 <= x <= 1 for x in row)


def fastest_size(sizes: TreeSizes, seconds: Callable[[int], float], most: int) -> int:
    """Return the number of nodes with the most expected tokens a second; 1 if no tree pays.

    Args:
        sizes: the trees.
        seconds: time of a step by the number of nodes, drafting included where there is more than one.
        most: the largest number to choose, such as the largest that was timed.
    """
    return max(range(1, min(most, len(sizes.taus)) + 1), key=lambda n: sizes.taus[n - 1] / seconds(n))


@torch.inference_mode()
def draft_seconds(heads: DraftHeads, lm_head: Callable[[Tensor], Tensor]) -> float:
    """Return the median time in which the heads score one position and rank the candidates: no cost table holds it.

    Args:
        heads: draft heads; Hydra's states follow one path of embeddings.
        lm_head: the base's head, as for `DraftHeads.project`.
    """
    host = HostHeads(heads, lm_head)  # what the drafter runs
    weight = next(heads.parameters())
    hidden = torch.zeros(1, heads.config.hidden_size, device=weight.device, dtype=weight.dtype)
    following = hidden.expand(1, heads.config.num_heads, -1)
    times = []
    for _ in range(_WARMUPS + _TIMED):
        start = time.perf_counter()
        logits = host.project(host.heads.states(hidden, following))
        logits.float().topk(min(10, logits.shape[-1])).indices.cpu()  # waits for the device, as the drafter does
        times.append(time.perf_counter() - start)
    return sorted(times[_WARMUPS:])[_TIMED // 2]


def _sizes(choices: list[Choice], worths: list[float]) -> TreeSizes:
    return TreeSizes(choices, list(accumulate(worths, initial=1.0)))
