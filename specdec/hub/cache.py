"""The user's cache directory, and files and folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        os.chmod(temporary, _new_file_mode())  # safetensors lets the owner alone read its files
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill beside a folder's place, then flush it to the disk and move it there in one step.

    A failure leaves nothing; a kill leaves `.NAME.PID.tmp` at most.

    Args:
        path: where it belongs; nothing, or an empty folder, is there.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            os.chmod(file, _new_file_mode())
        flush_folder(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Flush the files of a folder, and the folder itself, to the disk."""
    for path in (*sorted(folder.iterdir()), folder):
        _flush(path)


def _new_file_mode() -> int:
    """The permissions that files get where nobody asks for others."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
