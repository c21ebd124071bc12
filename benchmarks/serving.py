"""What the server's benchmarks share: `specdec serve` in a process of its own, and what can be asked of it."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import httpx2
import torch

from tests.conftest import tiny_llama
from tests.letters import letters

MODEL = "tiny"
_RUN = "from specdec.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs: its address and its process id."""

    url: str
    pid: int

    def resident_mb(self) -> float:
        """Return the process's memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return float(next(line for line in lines if line.startswith(f"specdec_{name} ")).split()[1])


@contextmanager
def serving(*options: str, model: str | None = None) -> Iterator[Serving]:
    """Serve a model, or else the tests' tiny one in fp32, until the block ends, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            tiny_llama(vocab_size=96, dtype=torch.float32, max_position_embeddings=1024).save_pretrained(folder)
            letters().save_pretrained(folder)
        port = free_port()
        command = [sys.executable, "-c", _RUN, "serve", "--model", model or folder, "--served-model-name", MODEL]
        command += ["--port", str(port), "--log-level", "warning", *options]
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            gc.collect()
            gc.freeze()  # as the server does: a client that stands still measures itself
            yield Serving(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            process.wait(60)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values don't exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return once the server that a process is takes requests."""
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            if httpx2.get(f"{url}/ready").status_code == 200:
                return
        except httpx2.ConnectError:
            time.sleep(0.1)
    raise RuntimeError("the server was not ready after 60 s")


def free_port() -> int:
    """Return a port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(result: dict[str, object], path: str | None) -> None:
    """Print a result, and write it to a file if one is asked for."""
    text = json.dumps(result, indent=1) + "\n"
    click.echo(text, nl=False)
    if path:
        Path(path).write_text(text, encoding="utf-8")
