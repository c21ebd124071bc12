"""What a result was measured on, and how much memory is in use."""

import gc
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec import __version__
from specdec.engine.cost import device_name

_PACKAGES = ("torch", "transformers", "triton", "vllm", "economize", "flashspec")


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the versions, the device and the command, as every result file names them; the commit of a checkout."""
    return {
        "command": " ".join(["specdec", *sys.argv[1:]]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdec": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak of the memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_bytes(device: torch.device) -> int | None:
    """Return the peak of the device's memory since `reset_peak`; on a CPU what the process holds now, on Linux."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (kilobytes,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(kilobytes) * 1024


def release_memory(device: torch.device) -> None:
    """Give back what systems that are gone held on a GPU: the next one may need it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _commit() -> str | None:
    """The checkout's commit, "-dirty" where files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git here, or it may not read the checkout
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
