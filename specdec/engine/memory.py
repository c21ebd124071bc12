"""How much memory the KV cache may take."""

import re

import torch

from specdec.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(value: int | str) -> int:
    """Return a number of bytes that was given as a number or with a unit, e.g. "2GiB" or "500 MB".

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(value).strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if num_bytes < 1 or isinstance(value, bool):
        raise ConfigError(f'kv_cache_memory must be bytes or a size such as "500MB" or "2GiB", not {value!r}')
    return num_bytes


def show_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"


def left_on_gpu(utilization: float, device: torch.device) -> int:
    """Return the bytes that a share of a GPU's memory leaves beside all that is there now, the weights for one.

    Raises:
        ConfigError: the device is no GPU, or nothing is left.
    """
    if device.type != "cuda":
        raise ConfigError(
            "gpu_memory_utilization is for GPUs, and the model is on the CPU; give kv_cache_memory instead"
        )
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * utilization) - (total - free)
    if left < 1:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} allows {show_bytes(int(total * utilization))} of this GPU, "
            f"and {show_bytes(total - free)} are taken before there is any cache; raise it, or take a smaller model"
        )
    return left
