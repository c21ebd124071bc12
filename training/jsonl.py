"""Reads files of one JSON object a line. Every complaint names the file and the line."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.errors import DataError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character; the other half should follow


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        DataError: it can't be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); give a file that can") from error


def decode(data: bytes, path: Path, line: int = 1) -> str:
    """Return UTF-8 text without its byte order mark.

    Args:
        data: the bytes.
        path: for the message.
        line: number of the first line of `data` in the file, from 1.

    Raises:
        DataError: it isn't UTF-8.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{at}: isn't UTF-8 text ({error.reason}); save the file as UTF-8") from error


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file with their places; blank lines are passed over.

    Yields:
        "FILE:LINE" and the object.

    Raises:
        DataError: the file can't be read, or a line holds no JSON object.
    """
    for number, raw in enumerate(read_bytes(path).split(b"\n"), start=1):
        text = decode(raw, path, number).strip()
        if text:
            yield f"{path}:{number}", parse_object(text, f"{path}:{number}")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that a line holds.

    Args:
        text: the line.
        where: "FILE:LINE", for the message.

    Raises:
        DataError: it holds no JSON object, or text that can't be encoded.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: isn't JSON ({error}); one JSON object must stand there") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {text[:40]!r}; one JSON object must stand there")
    if _SURROGATE.search(text):
        _check_characters(value, where)
    return value


def _check_characters(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{where}: holds half a character, {half}; cut texts between characters, not within") from error
