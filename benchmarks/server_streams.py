"""How many tokens a second the server streams to 64 clients, from an engine whose steps take a given time.

python -m benchmarks.server_streams --json benchmarks/results/server_streams.json

There is no model: a step sleeps, as the host does while a GPU computes, and then gives each request a token. So what is
measured is what the host does: the engine's counts and stops, text, events, HTTP. The clients are one process more. A
stream that falls behind gets several tokens in an event.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import click
import torch

from benchmarks.serving import MODEL, free_port, percentile, show, wait_until_ready
from specdec import LLM
from specdec.cli.serve import give_turns
from specdec.engine.emit import deliver_captured
from specdec.engine.engine import Engine
from specdec.server.app import make_app
from specdec.server.config import ServerConfig
from specdec.server.run import DrainingServer

STREAMS = 64


def sleeping(engine: Engine, seconds: float, tokens: Sequence[int]) -> Callable[[], None]:
    """Return a step that takes as long and then gives each request the next of the tokens, over and over."""
    scheduler = engine.scheduler

    def step() -> None:
        while scheduler.waiting:
            scheduler.running.append(scheduler.waiting.pop(0))
        time.sleep(seconds)
        for request in scheduler.running:
            deliver_captured(request, [tokens[len(request.tokens) % len(tokens)]], True, 1, "none")
            request.num_computed += 1
            engine.node_budget.observe(request, 1, padded=True)
        for request in [r for r in scheduler.running if r.finish_reason is not None]:
            scheduler.running.remove(request)

    return step


def serve(model: str, port: int, step_ms: float) -> None:
    """Serve a model's name and tokenizer."""
    llm = LLM(model, drafter="none", max_num_seqs=STREAMS, max_model_len=2048)
    tokens = llm.encoder.text("The quick brown fox jumps over the lazy dog and runs away from a small red house. ")
    llm.engine.step = sleeping(llm.engine, step_ms / 1000, tokens)  # type: ignore[method-assign]
    config = ServerConfig(port=port, model_name=MODEL)
    give_turns()
    DrainingServer(make_app(llm, config), config).run()


async def read_stream(port: int, num_tokens: int, gaps: list[float]) -> int:
    """Ask for as many tokens, note the seconds between events that come apart, and return the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    num_events, last = 0, None
    while data := await reader.read(1 << 16):
        if events := data.count(b"data: "):
            num_events, now = num_events + events, time.perf_counter()
            gaps += [now - last] if last is not None else []
            last = now
    writer.close()
    return num_events - 1  # the last one says that this was all


async def measure(port: int, num_tokens: int) -> dict[str, object]:
    """All streams at once."""
    gaps: list[float] = []
    start = time.perf_counter()
    events = await asyncio.gather(*(read_stream(port, num_tokens, gaps) for _ in range(STREAMS)))
    seconds = time.perf_counter() - start
    return {
        "tok_s": round(STREAMS * num_tokens / seconds),
        "tokens_an_event": round(STREAMS * num_tokens / sum(events), 2),
        "gap_ms_median": round(1000 * percentile(gaps, 0.5), 1),
        "gap_ms_p99": round(1000 * percentile(gaps, 0.99), 1),
    }


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Whose tokenizer makes the text.")
@click.option("--steps", default="1,2,5", show_default=True, help="Milliseconds of a step.")
@click.option("--tokens", default=400, show_default=True, help="Of each stream.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def main(model: str, steps: str, tokens: int, path: str | None) -> None:
    """Stream to 64 clients from an engine without a model."""
    rows = []
    for step_ms in map(float, steps.split(",")):
        port = free_port()
        code = f"from benchmarks.server_streams import serve; serve({model!r}, {port}, {step_ms})"
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            asyncio.run(measure(port, 20))
            rows.append({"step_ms": step_ms, **asyncio.run(measure(port, tokens))})
        finally:
            process.terminate()
            process.wait(60)
        click.echo(str(rows[-1]))
    command = f"python -m benchmarks.server_streams --model {model} --steps {steps} --tokens {tokens}"
    facts = {"command": command, "device": "CPU", "torch": torch.__version__}
    show({**facts, "streams": STREAMS, "tokens": tokens, "rows": rows}, path)


if __name__ == "__main__":
    main()
