"""Prometheus metrics: what requests waited for, what came out, and how speculation went."""

import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.engine.answers import AnswerChunk, Answers
from specdec.engine.async_engine import AsyncEngine

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        engine: whose counts are read when they are asked for.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCounts(engine))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"specdec_{name}", text, unit="seconds", buckets=buckets, registry=self._registry)

        self._first = histogram("time_to_first_token", "From a request's arrival to its first token.", _FIRST)
        self._token = histogram(
            "inter_token_latency", "Between two tokens of an answer; those that come together share the time.", _TOKEN
        )
        self._whole = histogram("request_latency", "From a request's arrival to an answer's last token.", _WHOLE)
        self._responses = Counter(
            "specdec_http_responses", "Responses by HTTP status.", ["status"], registry=self._registry
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def responded(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(str(status)).inc()

    async def watch(self, answers: Answers, start: float) -> AsyncIterator[AnswerChunk]:
        """Pass chunks on, measuring the time between them.

        Args:
            answers: whose.
            start: when the request arrived, by `time.perf_counter`.
        """
        last: dict[int, float] = {}
        async for chunk in answers:
            now = time.perf_counter()
            num_tokens = len(chunk.token_ids)
            if num_tokens and chunk.index not in last:
                self._first.observe(now - start)
            elif num_tokens:
                for _ in range(num_tokens):
                    self._token.observe((now - last[chunk.index]) / num_tokens)
            if num_tokens:
                last[chunk.index] = now
            if chunk.finish_reason is not None:
                self._whole.observe(now - start)
            yield chunk


class EngineCounts:
    """Reads the engine's own counts at each scrape; they are whole numbers, so no lock is needed."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._speculation()

    def _gauges(self) -> Iterator[Metric]:
        engine, pool = self._engine.engine, self._engine.engine.pool
        used = 1 - pool.num_free / pool.num_blocks
        for name, text, value in (
            ("num_requests_running", "Answers being generated.", len(engine.scheduler.running)),
            ("num_requests_waiting", "Answers that wait for a place.", len(engine.scheduler.waiting)),
            ("queue_capacity", "Answers that are taken at once, running and waiting.", self._engine.capacity),
            ("kv_cache_usage_ratio", "Share of the KV cache's blocks that are in use, 0 to 1.", used),
            ("kv_cache_blocks", "Blocks of the KV cache.", pool.num_blocks),
            ("prefix_cache_blocks", "Blocks not in use whose tokens can be found again.", pool.stats.num_cached_blocks),
            ("ready", "1 while new requests are taken.", int(self._engine.ready)),
        ):
            yield GaugeMetricFamily(f"specdec_{name}", text, value)

    def _counters(self) -> Iterator[Metric]:
        engine, totals = self._engine.engine, self._engine.totals
        prefix = engine.pool.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of ended answers.", totals.num_prompt_tokens),
            ("generation_tokens", "Tokens of ended answers.", totals.stats.num_output_tokens),
            (
                "prefix_cache_queried_tokens",
                "Prompt tokens looked for in the cache.",
                prefix.num_queried_tokens,
            ),
            ("prefix_cache_hit_tokens", "Those of them that were there.", prefix.num_hit_tokens),
            ("prefix_cache_evictions", "Cached blocks that had to make room.", prefix.num_evictions),
            ("preemptions", "Answers that had to give their blocks to others.", engine.scheduler.num_preemptions),
            ("steps", "Steps of the engine.", engine.num_steps),
        ):
            yield CounterMetricFamily(f"specdec_{name}", text, value)
        finished = CounterMetricFamily("specdec_requests", "Ended answers by finish reason.", labels=["finish_reason"])
        for reason, count in totals.finished.copy().items():
            finished.add_metric([reason], count)
        yield finished

    def _speculation(self) -> Iterator[Metric]:
        stats = self._engine.totals.stats
        for name, text, value in (
            ("num_forwards", "Forwards of the model that gave tokens, by answer.", stats.num_forwards),
            ("num_drafts", "Those that had draft tokens to score.", stats.num_drafts),
            ("num_draft_tokens", "Draft tokens that were scored.", stats.num_draft_tokens),
            ("num_accepted_tokens", "Draft tokens that were accepted.", stats.num_accepted_tokens),
        ):
            yield CounterMetricFamily(f"specdec_spec_decode_{name}", text, value)
        by_position = CounterMetricFamily(
            "specdec_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by depth in the tree; 0 is the first below the root.",
            labels=["position"],
        )
        for position, count in enumerate(list(stats.accepted_by_depth)):
            by_position.add_metric([str(position)], count)
        yield by_position
