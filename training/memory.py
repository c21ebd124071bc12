"""The most memory that this process has held: on a GPU what torch allocated, elsewhere what the system counted."""

import resource
import sys

import torch


def reset_peak(device: torch.device) -> None:
    """Begin to count anew, where that can be done: on a GPU. Elsewhere it is the peak since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak so far, in bytes.

    Args:
        device: of the model; a GPU's peak is of torch's tensors, a CPU's of the whole process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
