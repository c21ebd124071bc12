"""Random cases of the whole promise; benchmarks/property.py runs as many as one likes."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.property import cases, check


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_speculation_never_shows(num_cases: int) -> None:
    how = settings(max_examples=num_cases, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    how(given(case=cases())(check))()
