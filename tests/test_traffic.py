"""Random traffic in a full pool: no block is lost, no answer is wrong. benchmarks/traffic.py sends more of it."""

import pytest
from transformers import PreTrainedModel

from tests.traffic import TRAFFIC_DRAFTERS, Counts, add_counts, draw_requests, run_traffic


def traffic(model: PreTrainedModel, num_different: int, num_each: int) -> Counts:
    asked, total = draw_requests(model, num_different, seed=1), Counts()
    for seed, drafter in enumerate(TRAFFIC_DRAFTERS):
        add_counts(total, run_traffic(model, asked, drafter, num_each, seed))
    return total


def check(counts: Counts) -> None:
    assert (counts.wrong, counts.lost_blocks) == (0, 0)
    assert counts.preemptions and counts.aborts and counts.errors and counts.cached_tokens and counts.accepted_tokens


def test_some_random_traffic(tiny: PreTrainedModel) -> None:
    check(traffic(tiny, 40, 14))


@pytest.mark.slow
def test_a_thousand_random_requests(tiny: PreTrainedModel) -> None:
    counts = traffic(tiny, 200, 91)
    assert counts.requests > 1000
    check(counts)
