"""Hostile requests beside ordinary ones: all are refused, soon; the others get the tokens that they get alone.

python -m benchmarks.server_hostile --requests 2000 --json benchmarks/results/server_hostile.json

Half of them come from schemathesis, which breaks our own OpenAPI; the others are tests/test_server_limits.py's list,
again and again. Needs the `hostile` extra.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import click
import httpx2
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from benchmarks.serving import MODEL, percentile, serving, show
from tests.test_server_limits import HOSTILE

VICTIM = {"model": MODEL, "prompt": "victim", "max_tokens": 100, "temperature": 0}
OPERATIONS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


def broken(url: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield requests against the server's OpenAPI, ready to be sent."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for path in OPERATIONS:
        for case in _broken(schema[path]["POST"], count // len(OPERATIONS)):
            yield case.as_transport_kwargs(base_url=url)


def _broken(operation: schemathesis.APIOperation, count: int) -> list[schemathesis.Case]:
    found = []

    @seed(0)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def collect(case: schemathesis.Case) -> None:
        found.append(case)

    collect()
    return found


def handmade(url: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the requests of the tests' list, again and again."""
    for path, body in islice(cycle(HOSTILE.values()), count):
        headers = {"content-type": "application/json"}
        yield {"method": "POST", "url": url + path, "data": json.dumps(body).encode(), "headers": headers}


class Victims:
    """A client that asks the same all the time and counts the answers that differ from the first.

    Args:
        url: the server's.
    """

    def __init__(self, url: str) -> None:
        self.num_asked = self.num_changed = 0
        self._url, self._ended = url, threading.Event()
        self._want = self._ask()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()

    def _ask(self) -> str:
        response = httpx2.post(f"{self._url}/v1/completions", json=VICTIM, timeout=60)
        return str(response.json()["choices"][0]["text"])

    def _run(self) -> None:
        while not self._ended.is_set():
            self.num_asked += 1
            self.num_changed += self._ask() != self._want


@click.command()
@click.option("--requests", "count", default=2000, show_default=True, help="Hostile requests.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the result to this file.")
def main(count: int, path: str | None) -> None:
    """Send them and count."""
    statuses: Counter[str] = Counter()
    seconds: list[float] = []
    with serving("--max-model-len", "256") as server:
        cases = [*broken(server.url, count // 2), *handmade(server.url, count - count // 2)]
        victims = Victims(server.url)
        with httpx2.Client(timeout=60) as client:
            for case in cases:
                headers = {name: value for name, value in case["headers"].items() if value is not None}
                request = {"content": case.get("data"), "json": case.get("json"), "headers": headers}
                start = time.perf_counter()
                response = client.request(case["method"], case["url"], params=case.get("params"), **request)
                seconds.append(time.perf_counter() - start)
                statuses[str(response.status_code)] += 1
        victims.stop()
        ready = server.metric("ready")
    result = {
        "command": f"python -m benchmarks.server_hostile --requests {count}",
        "torch": torch.__version__,
        "schemathesis": schemathesis.__version__,
        "requests": len(cases),
        "statuses": dict(statuses),
        "p50_ms": 1000 * percentile(seconds, 0.5),
        "p99_ms": 1000 * percentile(seconds, 0.99),
        "victims": victims.num_asked,
        "victims_changed": victims.num_changed,
        "ready_after": ready,
    }
    show(result, path)


if __name__ == "__main__":
    main()
