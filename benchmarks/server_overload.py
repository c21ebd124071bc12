"""Twice as many requests as the server can answer, for minutes: what it answers, how soon, and how its memory grows.

python -m benchmarks.server_overload --seconds 600 --json benchmarks/results/server_overload.json

The tiny model on one CPU thread; arrivals are random (Poisson) and don't wait for answers. Memory growth is from a
quarter of the time to its end. The clients share the machine with the server, so their times hold what they waited for
themselves; how late they sent their requests says how much that may be.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import click
import httpx2
import torch

from benchmarks.serving import MODEL, Serving, percentile, serving, show

CAPACITY_SECONDS = 10
CLIENTS = 16


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    rejected_seconds: list[float] = field(default_factory=list)
    answered_seconds: list[float] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)
    without_retry_after: int = 0


async def ask(client: httpx2.AsyncClient, rng: random.Random, seen: Seen) -> None:
    """Send one request and note what came."""
    body = {"model": MODEL, "prompt": [rng.randrange(95) for _ in range(rng.randint(5, 60))], "seed": rng.randrange(99)}
    body |= {"max_tokens": rng.randint(10, 60), "stream": rng.random() < 0.5}
    start = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - start
    seen.statuses[str(response.status_code)] += 1
    if response.status_code == 200:
        seen.answered_seconds.append(seconds)
    else:
        seen.rejected_seconds.append(seconds)
        seen.without_retry_after += "retry-after" not in response.headers


async def capacity(url: str) -> float:
    """Return the requests a second that as many clients as run at once get answered, one after the other."""
    seen = Seen()
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        end = time.perf_counter() + CAPACITY_SECONDS

        async def loop(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() < end:
                await ask(client, rng, seen)

        await asyncio.gather(*(loop(i) for i in range(CLIENTS)))
    return seen.statuses["200"] / CAPACITY_SECONDS


async def overload(server: Serving, rate: float, seconds: float) -> tuple[Seen, list[tuple[float, float]]]:
    """Send `rate` requests a second; return what was seen, and the server's memory over time."""
    seen, rng, memory = Seen(), random.Random(0), []
    limits = httpx2.Limits(max_connections=2000, max_keepalive_connections=2000)
    async with httpx2.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        start = due = time.perf_counter()
        asking: set[asyncio.Task[None]] = set()
        while due < start + seconds:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            seen.late_seconds.append(time.perf_counter() - due)
            task = asyncio.create_task(ask(client, random.Random(rng.random()), seen))
            asking.add(task)
            task.add_done_callback(asking.discard)
            if not memory or time.perf_counter() - start > memory[-1][0] + 1:
                memory.append((time.perf_counter() - start, server.resident_mb()))
        await asyncio.gather(*asking)
    return seen, memory


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long the overload lasts.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the result to this file.")
def main(seconds: float, path: str | None) -> None:
    """Measure the capacity, then send twice as much."""
    with serving("--max-num-seqs", str(CLIENTS), "--max-queue", "32", "--num-blocks", "256") as server:
        able = asyncio.run(capacity(server.url))
        seen, memory = asyncio.run(overload(server, 2 * able, seconds))
        settled = [mb for at, mb in memory if at >= seconds / 4]
        time.sleep(1)
        idle = {name: server.metric(name) for name in ("num_requests_running", "num_requests_waiting")}
        idle["kv_cache_usage_ratio"] = server.metric("kv_cache_usage_ratio")
    result = {
        "command": f"python -m benchmarks.server_overload --seconds {seconds:g}",
        "torch": torch.__version__,
        "capacity_requests_s": able,
        "sent_requests_s": 2 * able,
        "statuses": dict(seen.statuses),
        "rejected_p50_ms": 1000 * percentile(seen.rejected_seconds, 0.5),
        "rejected_p99_ms": 1000 * percentile(seen.rejected_seconds, 0.99),
        "rejected_without_retry_after": seen.without_retry_after,
        "sent_late_p99_ms": 1000 * percentile(seen.late_seconds, 0.99),
        "answered_p50_s": percentile(seen.answered_seconds, 0.5),
        "answered_p99_s": percentile(seen.answered_seconds, 0.99),
        "memory_mb": [round(settled[0], 1), round(settled[-1], 1)],
        "memory_growth": settled[-1] / settled[0] - 1,
        "idle_after": idle,
    }
    show(result, path)


if __name__ == "__main__":
    main()
