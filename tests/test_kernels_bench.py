"""What the benchmark of kernels makes of times; the times themselves need a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernels_gpu import _attention_row, by_turns


def test_ways_are_measured_by_turns() -> None:
    """So that none has a process's first times alone; what is written is each one's median."""
    found: list[str] = []
    times = {"a": iter([9.0, 1.0, 2.0]), "b": iter([5.0, 4.0, 3.0])}

    def way(name: str) -> float:
        found.append(name)
        return next(times[name])

    assert by_turns({name: lambda name=name: way(name) for name in times}) == {"a": 2.0, "b": 4.0}
    assert found == ["a", "b"] * 3


def test_attention_beside_others() -> None:
    """Shares are of the bytes of keys and values; torch's time is as it was found."""
    us = {"chains": 250.0, "trees": 500.0, "rows": 260.04}
    case: Any = SimpleNamespace(
        num_sequences=8, context=32768, nodes=1, layout=SimpleNamespace(bytes_per_token=4096),
        work="chains", tree_work="trees", meta="rows", ours=us.__getitem__,
    )  # fmt: skip
    row = _attention_row(case, 2.5, {"sdpa": lambda: 247.26})
    read = 8 * 32769 * 4096 / 2.5e6
    assert {name: row[name] for name in ("chain_us", "tree_us", "eager_us", "sdpa_us")} == {
        "chain_us": 250.0, "tree_us": 500.0, "eager_us": 260.0, "sdpa_us": 247.3,
    }  # fmt: skip
    assert [row["chain_share_of_copy"], row["tree_share_of_copy"]] == pytest.approx([read / 250, read / 500], abs=1e-3)
    assert "sdpa_share_of_copy" not in row
