"""`bench serve`: sends requests to an OpenAI-compatible server at given times and measures the streams that come back.

Knows HTTP and prompts; nothing of engines.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec.bench.dataset import Prompt
from specdec.bench.latencies import Timing, num_good, summarize_timings
from specdec.bench.server_metrics import against_server, seen_by_server, server_totals
from specdec.errors import ConfigError, SpecdecError

if TYPE_CHECKING:
    from httpx2 import AsyncClient

FORMAT = "specdec-serve"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What is to be sent.

    Args:
        base_url: the server's, without /v1.
        model: to ask for; None asks for the first that the server names.
        endpoint: "chat" or "completions".
        num_prompts: requests at each rate; drawn with `seed`, again and again if there are too few prompts.
        request_rates: requests a second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the pauses: 1 is a Poisson process, less comes in bursts.
        max_concurrency: most requests in flight; others wait, unmeasured, on our side. None for any number.
        max_new_tokens, temperature, ignore_eos: of the answers; the last is no field of OpenAI's.
        extra_body: more fields of each request, as the server knows them.
        limits: ms by name, for goodput.
        seed: of the draws and the pauses.

    Raises:
        ConfigError: a value is out of bounds.
    """

    base_url: str
    model: str | None = None
    endpoint: str = "chat"
    num_prompts: int = 100
    request_rates: tuple[float, ...] = (float("inf"),)
    burstiness: float = 1.0
    max_concurrency: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    limits: dict[str, float] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the server's address must begin with http:// or https://, not be {self.base_url!r}")
        if not self.request_rates or not all(rate > 0 for rate in self.request_rates):
            raise ConfigError(f"request rates must be above 0, or inf; not {list(self.request_rates)}")
        if not self.burstiness > 0:
            raise ConfigError(f"burstiness must be above 0, not {self.burstiness}")

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


Progress = Callable[[float, int], None]
"""Is told the rate and how many of its requests have ended."""


def measure_server(
    settings: ServeSettings, prompts: Sequence[Prompt], progress: Progress, api_key: str | None = None
) -> list[dict[str, Any]]:
    """Send all requests at each rate, one rate after the other, and return one run for each.

    Raises:
        SpecdecError: the server can't be reached, or answered no request.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return asyncio.run(_measure(settings, prompts, progress, headers))


async def _measure(
    settings: ServeSettings, prompts: Sequence[Prompt], progress: Progress, headers: dict[str, str]
) -> list[dict[str, Any]]:
    import httpx2

    runs = []
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    made = httpx2.AsyncClient(base_url=settings.base_url, headers=headers, timeout=None, limits=limits)
    async with made as client:
        try:
            model = settings.model or await _first_model(client)
        except httpx2.HTTPError as error:
            raise SpecdecError(
                f"the server at {settings.base_url} can't be asked for its models ({error}); start one, or correct "
                "the address"
            ) from error
        for rate in settings.request_rates:
            bodies = [_body(settings, model, prompt) for prompt in draw(prompts, settings.num_prompts, settings.seed)]
            at = arrivals(len(bodies), rate, settings.burstiness, settings.seed)
            before, start = await server_totals(client), perf_counter()
            results = await _send_all(client, settings, bodies, at, partial(progress, rate))
            run = _run(settings, rate, results, perf_counter() - start)
            run["server"] = seen_by_server(before, await server_totals(client))
            run["against_server"] = against_server(run, run["server"])
            runs.append(run)
    return runs


async def _first_model(client: "AsyncClient") -> str:
    response = await client.get("/v1/models")
    response.raise_for_status()
    models = response.json()["data"]
    if not models:
        raise SpecdecError(f"the server at {client.base_url} names no model; give one")
    return str(models[0]["id"])


def draw(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Return that many prompts in an order drawn with the seed; all of them before any comes again."""
    generator = random.Random(seed)
    drawn: list[Prompt] = []
    while len(drawn) < count:
        drawn += generator.sample(list(prompts), len(prompts))
    return drawn[:count]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each request is sent, in seconds from the start; the mean pause is 1 / rate."""
    if rate == float("inf"):
        return [0.0] * count
    generator = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + generator.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times


def _body(settings: ServeSettings, model: str, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    text = prompt.text or "\n\n".join(message["content"] for message in prompt.messages)
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    asked = {"messages": list(messages)} if settings.endpoint == "chat" else {"prompt": text}
    return body | asked | settings.extra_body


async def _send_all(
    client: "AsyncClient",
    settings: ServeSettings,
    bodies: Sequence[dict[str, Any]],
    at: Sequence[float],
    progress: Callable[[int], None],
) -> list[Timing | str]:
    """Send each request at its time; return its timing, or why it failed."""
    free = asyncio.Semaphore(settings.max_concurrency) if settings.max_concurrency else nullcontext()
    start, done = perf_counter(), 0

    async def one(body: dict[str, Any], when: float) -> Timing | str:
        nonlocal done
        await asyncio.sleep(max(0.0, start + when - perf_counter()))
        async with free:
            result = await _send(client, settings.path, body)
        done += 1
        progress(done)
        return result

    return await asyncio.gather(*(one(body, when) for body, when in zip(bodies, at, strict=True)))


async def _send(client: "AsyncClient", path: str, body: dict[str, Any]) -> Timing | str:
    import httpx2

    timing = Timing(perf_counter())
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return f"HTTP {response.status_code}: {' '.join(text.split())[:200]}"
            async for event in _events(response.aiter_lines()):
                if "error" in event:
                    return f"error in the stream: {event['error']}"
                _note(timing, event, perf_counter())
    except (httpx2.HTTPError, json.JSONDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    timing.end = perf_counter()
    if not timing.num_output_tokens:
        return "the server sent no usage; it must support stream_options.include_usage"
    return timing


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    async for line in lines:
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _note(timing: Timing, event: dict[str, Any], now: float) -> None:
    """Put down a piece, which has text or, where the server tells them, tokens; and what is said of tokens."""
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    delta = choice.get("delta") or {}
    usage = event.get("usage")
    count = _num_tokens(choice, usage, sum(timing.chunk_tokens)) if choice else None
    if count or choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
        timing.chunks.append(now)
        if count is not None:
            timing.chunk_tokens.append(count)
    if usage:
        timing.num_prompt_tokens, timing.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _num_tokens(choice: dict[str, Any], usage: dict[str, Any] | None, before: int) -> int | None:
    """Tokens of a piece where the server says so: by their ids, by who proposed them, or by the usage so far."""
    for name in ("token_ids", "trace"):
        if isinstance(choice.get(name), list):
            return len(choice[name])
    return usage["completion_tokens"] - before if usage else None


def _run(settings: ServeSettings, rate: float, results: Sequence[Timing | str], seconds: float) -> dict[str, Any]:
    """What is reported of one rate."""
    timings = [result for result in results if isinstance(result, Timing)]
    errors = Counter(result for result in results if isinstance(result, str))
    if not timings:
        raise SpecdecError(f"the server answered none of {len(results)} requests; {next(iter(errors))}")
    num_prompt, num_output = (sum(getattr(t, f"num_{of}_tokens") for t in timings) for of in ("prompt", "output"))
    return {
        "request_rate": None if rate == float("inf") else rate,
        "duration": seconds,
        "completed": len(timings),
        "failed": errors.total(),
        "errors": dict(errors),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(timings) / seconds,
        "request_goodput": num_good(timings, settings.limits) / seconds if settings.limits else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
        **summarize_timings(timings),
    }


def as_json(settings: ServeSettings, prompts: str, command: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a result file holds; a rate of infinity is null.

    A run's `server` holds what the server's own metrics say of it, `against_server` our numbers divided by those; both
    are null unless the server is one of ours.
    """
    rates = [None if rate == float("inf") else rate for rate in settings.request_rates]
    body = asdict(settings) | {"request_rates": rates, "prompts": prompts}
    return {"format": FORMAT, "version": VERSION, "command": command, "settings": body, "runs": runs}
