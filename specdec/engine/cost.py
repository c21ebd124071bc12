"""How long a step takes on this device, as `specdec tune` measured it, and where that is kept.

Knows numbers and files; neither requests nor how a step is run.
"""

import json
import math
import os
import platform
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from specdec.errors import ConfigError
from specdec.hub.cache import cache_root, replace_file
from specdec.verifier.tree import MAX_NODES

FORMAT = "specdec-costs"
VERSION = 1
AGAIN = "run `specdec tune` again"


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a table is true for.

    Args:
        fingerprint: of the model, as `specdec.drafters.heads.base_fingerprint` computes it.
        device: the device's name, as `device_name` gives it.
        dtype: of the weights, `bfloat16` for one, how they are quantized, and whether they are prepacked.
        torch: torch's version.
        deterministic: whether the kernels give a row the same bits in any batch.
        kv_cache: how keys and values are stored, as `EngineConfig.kv_cache_name` says; tables from before it was
            looked at are of native pages.
    """

    fingerprint: str
    device: str
    dtype: str
    torch: str
    deterministic: bool = True
    kv_cache: str = "auto"

    @property
    def file_name(self) -> str:
        """Name of the table's file; it holds the whole key."""
        parts = [self.fingerprint, self.device, self.dtype, f"torch{self.torch}"]
        parts += [] if self.deterministic else ["nondeterministic"]
        parts += [] if self.kv_cache == "auto" else [f"kv-{self.kv_cache}"]
        return re.sub(r"[^\w.+-]+", "_", "-".join(parts)) + ".json"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one step over a grid of batch size × nodes × context.

    Args:
        key: what it was measured for.
        model: the model's name, for people.
        command: what measured it.
        measured: when, in ISO 8601.
        num_seqs: S numbers of sequences, ascending.
        num_nodes: N numbers of tree nodes a sequence, root included, ascending from 1.
        contexts: C numbers of committed tokens a sequence, ascending.
        step_seconds: [S][N][C], the time of a step in which all sequences are alike.

    Raises:
        ConfigError: an axis isn't ascending, or the times don't fit the axes or are none.
    """

    key: CostKey
    model: str
    command: str
    measured: str
    num_seqs: tuple[int, ...]
    num_nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    step_seconds: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for name in ("num_seqs", "num_nodes", "contexts"):
            axis = getattr(self, name)
            if not axis or not all(_is_int(x) and x > 0 for x in axis) or list(axis) != sorted(set(axis)):
                raise ConfigError(f"{name} of a cost table must be ascending whole numbers from 1, not {axis!r}")
        if self.num_nodes[0] != 1 or self.num_nodes[-1] > MAX_NODES:
            raise ConfigError(f"num_nodes of a cost table must start at 1 and end by {MAX_NODES}: {self.num_nodes!r}")
        rows = [row for plane in self.step_seconds for row in plane]
        shape = (len(self.num_seqs), len(self.num_nodes), len(self.contexts))
        if (
            len(self.step_seconds) != shape[0]
            or any(len(plane) != shape[1] for plane in self.step_seconds)
            or any(len(row) != shape[2] for row in rows)
        ):
            raise ConfigError(f"step_seconds of a cost table must be {' × '.join(map(str, shape))} numbers")
        bad = next((x for row in rows for x in row if not _is_time(x)), None)
        if bad is not None:
            raise ConfigError(f"step_seconds of a cost table must be finite and above 0, not {bad!r}")

    def seconds(self, num_seqs: float, num_nodes: float, context: float) -> float:
        """Return the time of a step, linear between measured points and constant beyond the ends of each axis.

        Args:
            num_seqs: sequences of the step.
            num_nodes: tree nodes a sequence, root included.
            context: committed tokens a sequence.
        """
        total = 0.0
        for s, share_s in _neighbours(self.num_seqs, num_seqs):
            for n, share_n in _neighbours(self.num_nodes, num_nodes):
                for c, share_c in _neighbours(self.contexts, context):
                    total += share_s * share_n * share_c * self.step_seconds[s][n][c]
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON knows it."""
        return {"format": FORMAT, "version": VERSION} | asdict(self)

    @classmethod
    def from_dict(cls, raw: object) -> "CostTable":
        """Read what `to_dict` gave.

        Raises:
            ConfigError: it is of another format or version, a field is missing, unknown or of the wrong kind.
        """
        if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
            raise ConfigError(f"not a cost table of version {VERSION}")
        body = {name: value for name, value in raw.items() if name not in ("format", "version")}
        _check_fields(cls, body, "the table")
        if isinstance(body["key"], dict):
            body["key"] = {"kv_cache": "auto"} | body["key"]
        _check_fields(CostKey, body["key"], "its key")
        try:
            body["step_seconds"] = tuple(tuple(tuple(row) for row in plane) for plane in body["step_seconds"])
            body |= {name: tuple(body[name]) for name in ("num_seqs", "num_nodes", "contexts")}
        except TypeError as error:
            raise ConfigError(f"an axis or the times are no lists ({error})") from error
        strings = {name: body[name] for name in ("model", "command", "measured")}
        strings |= {name: value for name, value in body["key"].items() if name != "deterministic"}
        bad = next((name for name, value in strings.items() if not isinstance(value, str)), None)
        if bad is not None or not isinstance(body["key"]["deterministic"], bool):
            raise ConfigError(f"{bad or 'deterministic'} is of the wrong kind")
        return cls(**body | {"key": CostKey(**body["key"])})


def device_name(device: torch.device) -> str:
    """Return what tells one device's speed from another's: the card's name, or the processor and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} {platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def costs_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all tables: in `cache_dir`, `$SPECDEC_CACHE`, or else the user's cache directory."""
    return cache_root(cache_dir) / "costs"


def save_table(table: CostTable, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Put a table where `find_table` looks, in one atomic step, in the place of an older one; return its file.

    Raises:
        ConfigError: the folder can't be written.
    """
    path = costs_folder(cache_dir) / table.key.file_name
    text = json.dumps(table.to_dict(), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error}; set SPECDEC_CACHE to a folder that can be written") from error
    return path


def read_table(path: Path) -> CostTable:
    """Read one table's file.

    Raises:
        ConfigError: it can't be read, or isn't a whole table of this version.
    """
    try:
        return CostTable.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # a ConfigError is a ValueError too
        raise ConfigError(f"the cost table {path} can't be used: {error}; {AGAIN}, or remove the file") from error


def find_table(key: CostKey, cache_dir: str | os.PathLike[str] | None = None) -> CostTable | None:
    """Return the table measured for a model on a device, None if there is none.

    Raises:
        ConfigError: its file is broken, or was measured for something else.
    """
    path = costs_folder(cache_dir) / key.file_name
    if not path.exists():
        return None
    table = read_table(path)
    if table.key != key:
        raise ConfigError(f"the cost table {path} was measured for {table.key}, not {key}; {AGAIN}, or remove the file")
    return table


def list_tables(cache_dir: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Yield the files of all tables, the newest first."""
    files = costs_folder(cache_dir).glob("*.json")
    yield from sorted((f for f in files if not f.name.startswith(".")), key=lambda f: f.stat().st_mtime, reverse=True)


def _neighbours(axis: Sequence[int], x: float) -> list[tuple[int, float]]:
    """The measured points on both sides of x, as indices, and their shares in it."""
    high = bisect_right(axis, x)
    if high == 0:
        return [(0, 1.0)]
    if high == len(axis):
        return [(high - 1, 1.0)]
    share = (x - axis[high - 1]) / (axis[high] - axis[high - 1])
    return [(high - 1, 1 - share), (high, share)]


def _check_fields(kind: type[CostTable] | type[CostKey], raw: object, what: str) -> None:
    wanted = {f.name for f in fields(kind)}
    if not isinstance(raw, dict) or set(raw) != wanted:
        odd = sorted(wanted ^ set(raw)) if isinstance(raw, dict) else sorted(wanted)
        raise ConfigError(f"{what} lacks or has in excess: {', '.join(odd)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
