"""The user's cache directory, and files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder under which everything lies that specdec keeps between runs.

    Args:
        cache_dir: instead of `$SPECDEC_CACHE`, or else the user's cache directory.
    """
    root = cache_dir or os.environ.get("SPECDEC_CACHE") or platformdirs.user_cache_dir("specdec", appauthor=False)
    return Path(root).expanduser().absolute()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, flush it to the disk, then move it there: a reader sees the old or the new.

    Args:
        path: where it belongs; its folder exists.
        write: writes the contents to the path that it is given.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
