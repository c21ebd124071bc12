"""200 random cases of the whole promise; benchmarks/property.py runs as many as one likes."""

from hypothesis import HealthCheck, given, settings

from tests.property import Case, cases, check


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_speculation_never_shows(case: Case) -> None:
    check(case)
