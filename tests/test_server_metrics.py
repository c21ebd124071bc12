"""The metrics: what they count, and that the dashboard asks for metrics that exist."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import specdec.server
from tests.server import Served, served, until


def read(server: Served) -> dict[str, float]:
    """The samples that have no label but `le`, `position`, `status` or `finish_reason`, by name and that label."""
    samples = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        assert family.name.startswith("specdec_") and family.documentation.endswith(".")
        for sample in family.samples:
            samples["/".join([sample.name, *sample.labels.values()])] = sample.value
    return samples


def test_metrics_count_what_happened() -> None:
    with served() as server:
        before = read(server)
        assert before["specdec_ready"] == 1 and before["specdec_generation_tokens_total"] == 0
        usage = [server.complete("abab" * 10, max_tokens=n, ignore_eos=True).json()["usage"] for n in (30, 50)]
        assert server.complete(n=0).status_code == 400
        until(lambda: read(server)["specdec_http_responses_total/200"] > 2)
        after = read(server)
        total = {key: sum(u["speculation"][key] for u in usage) for key in ("num_drafts", "num_accepted_tokens")}
        assert after["specdec_generation_tokens_total"] == 80 and after["specdec_prompt_tokens_total"] == 80
        assert after["specdec_spec_decode_num_drafts_total"] == total["num_drafts"]
        assert after["specdec_spec_decode_num_accepted_tokens_total"] == total["num_accepted_tokens"]
        first = sum(sum(u["speculation"]["accepted_by_depth"][:1]) for u in usage)
        assert after["specdec_spec_decode_num_accepted_tokens_per_pos_total/0"] == first
        assert after["specdec_requests_total/length"] == 2 and after["specdec_http_responses_total/400"] == 1
        assert after["specdec_time_to_first_token_seconds_count"] == 2 == after["specdec_request_latency_seconds_count"]
        assert after["specdec_inter_token_latency_seconds_count"] == pytest.approx(78, abs=12)  # but for the first ones
        assert after["specdec_prefix_cache_hit_tokens_total"] == 32  # the second prompt's full blocks
        assert after["specdec_kv_cache_usage_ratio"] == 0 and after["specdec_steps_total"] > 2


def test_the_dashboard_shows_metrics_that_exist() -> None:
    assert specdec.server.__file__ is not None
    dashboard = json.loads((Path(specdec.server.__file__).parent / "dashboard.json").read_text())
    asked = re.findall(r"specdec_\w+", " ".join(t["expr"] for p in dashboard["panels"] for t in p["targets"]))
    with served() as server:
        server.complete("abab" * 10, max_tokens=30)
        until(lambda: "specdec_http_responses_total/200" in read(server))
        known = {name.split("/")[0] for name in read(server)}
    assert len(asked) > 20 and set(asked) <= known
