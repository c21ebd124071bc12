"""The result of `bench acceptance`: cells of raw counts and times, kept on disk as they come. Derives nothing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, DataError
from specdec.hub.cache import replace_file
from specdec.outputs import SpeculationStats

FORMAT = "specdec-acceptance"
VERSION = 2


@dataclass(frozen=True, slots=True)
class Split:
    """Where the seconds of a few answers went, in steps that the host plans.

    Args:
        draft, forward, accept: in the drafter, the target and the rule.
        host: all the rest: scheduling, packing, commit, delivery.
        num_prompts: how many answers.
        tree: (node as in Medusa's choices, times proposed, times accepted) of every node.
    """

    draft: float
    forward: float
    accept: float
    host: float
    num_prompts: int
    tree: list[tuple[list[int], int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be measured.

    Args:
        model: as for `LLM`.
        drafters: to be compared.
        peers: other engines to run as well.
        baseline: the system that speed-ups are against and whose tokens are the reference.
        prompts: "builtin" or a file.
        categories: of the prompts; empty for all.
        num_prompts: of each category; None for all.
        peer_prompts: of those the ones that peers answer, in whole batches; None for all.
        temperature: 0 is greedy.
        max_new_tokens: of each answer.
        batch_sizes: prompts that are answered together.
        trees: most nodes of a tree, root included; empty leaves it to the drafter and the cost table.
        seed: of the requests' seeds.
        device, dtype, deterministic: as for `LLM`.

    Raises:
        ConfigError: nothing is to be measured, or twice the same.
    """

    model: str
    drafters: tuple[str, ...]
    peers: tuple[str, ...] = ()
    baseline: str = "plain"
    prompts: str = "builtin"
    categories: tuple[str, ...] = ()
    num_prompts: int | None = None
    peer_prompts: int | None = None
    temperature: float = 0.0
    max_new_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1,)
    trees: tuple[int, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not self.drafters and not self.peers:
            raise ConfigError("there is nothing to compare with the baseline; give a drafter or a peer")
        names = [self.baseline, *self.drafters, *self.peers]
        given: tuple[tuple[str, list[Any]], ...] = (
            ("system", names),
            ("batch size", list(self.batch_sizes)),
            ("tree size", list(self.trees)),
        )
        for what, values in given:
            if twice := [value for value in values if values.count(value) > 1]:
                raise ConfigError(f"{what} {twice[0]!r} is given twice")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first differs from the baseline's.

    Args:
        prompt: its id.
        position: of the first different token in the answer.
        margin: distance of the model's two best logits there.
    """

    prompt: str
    position: int
    margin: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One system on one category at one batch size.

    Args:
        system, max_nodes, category, batch_size: which.
        drafter: the drafter that the system turned out to use, such as "ngram+recurrent" of "auto"; None for peers.
        prompts: the prompts' ids in order.
        seconds: of each group of `batch_size` prompts.
        num_tokens: delivered in each group.
        stats: counters of all answers together; None for peers, which have none.
        divergences: None where the baseline's tokens are no reference: a peer that samples, the baseline itself, or
            prompts that it failed on.
        split: where the time went; None for peers, and but for the least batch size.
        memory_bytes: peak on a GPU, held by the process on a CPU.
    """

    system: str
    drafter: str | None
    max_nodes: int | None
    category: str
    batch_size: int
    prompts: list[str]
    seconds: list[float]
    num_tokens: list[int]
    stats: SpeculationStats | None
    divergences: list[Divergence] | None
    split: Split | None
    memory_bytes: int | None

    @property
    def key(self) -> tuple[object, ...]:
        """What no other cell of the result has."""
        return self.system, self.max_nodes, self.category, self.batch_size


@dataclass(frozen=True, slots=True)
class Failure:
    """What couldn't be measured, and why; `category` and `batch_size` are None if the system couldn't be opened."""

    system: str
    max_nodes: int | None
    category: str | None
    batch_size: int | None
    error: str


@dataclass(slots=True)
class Result:
    """All that was measured so far.

    Args:
        settings: what was asked for.
        environment: as `environment` gives it.
        cells, failures: in the order of their measurement.
        reference: prompt id → the baseline's tokens.
    """

    settings: Settings
    environment: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    reference: dict[str, list[int]] = field(default_factory=dict)

    def as_json(self, summary: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what the file holds: everything, and a summary for those who don't want to compute it."""
        body = asdict(self)
        body["reference"] = {name: " ".join(map(str, tokens)) for name, tokens in self.reference.items()}
        return {"format": FORMAT, "version": VERSION, **body, "summary": summary}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    text = _json(value) + "\n"
    try:
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror}); give another file") from error


def _json(value: Any, indent: str = "") -> str:
    """As `json.dumps` with an indent of 1, but for lists of plain values, which keep to one line."""
    spread = isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and any(isinstance(v, Mapping | list | tuple) for v in value)
    )
    if not spread or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, Mapping):
        lines = [f"{json.dumps(name, ensure_ascii=False)}: {_json(v, inner)}" for name, v in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    if all(isinstance(v, list | tuple) for v in value):  # a table: a line a row
        lines = [json.dumps(v, ensure_ascii=False) for v in value]
    else:
        lines = [_json(v, inner) for v in value]
    return "[\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}]"


def read_result(path: Path) -> Result:
    """Read what `Result.as_json` gave.

    Raises:
        DataError: the file can't be read, or is no such result.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); give a result of `bench acceptance`") from error
    except ValueError as error:
        raise DataError(f"{path}: isn't JSON ({error})") from error
    if not isinstance(value, dict) or (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path}: is no result of `bench acceptance` of this version")
    try:
        return Result(
            _settings(value["settings"]),
            value["environment"],
            [_cell(cell) for cell in value["cells"]],
            [Failure(**failure) for failure in value["failures"]],
            {name: [int(token) for token in tokens.split()] for name, tokens in value["reference"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path}: is no whole result of `bench acceptance` ({error!r})") from error


def _settings(value: dict[str, Any]) -> Settings:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
    return Settings(**given)


def _cell(value: dict[str, Any]) -> Cell:
    made = dict(value)
    for name, kind in (("stats", SpeculationStats), ("split", Split)):
        made[name] = kind(**value[name]) if value[name] is not None else None
    if value["divergences"] is not None:
        made["divergences"] = [Divergence(**one) for one in value["divergences"]]
    return Cell(**made)


def same_settings(one: Settings, other: Settings, path: Path) -> None:
    """Check that a run may go on with a result.

    Raises:
        ConfigError: it was measured with other settings; the message names the first that differs.
    """
    for name in (f.name for f in fields(Settings)):
        was, now = getattr(one, name), getattr(other, name)
        if was != now:
            raise ConfigError(
                f"{path} was measured with {name} {was!r}, not {now!r}; give the same, or another file without --resume"
            )


def same_environment(one: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """Check that a run goes on where it began: its file names one device and one set of versions for all cells.

    Args:
        one, other: as `specdec.bench.environment.environment` gives them: the file's and the present one.
        path: the file, for the message.

    Raises:
        ConfigError: it was measured elsewhere; the message names the first difference.
    """
    for name in ("device", "dtype", "threads", "specdec", "python", "packages"):
        was, now = one.get(name), other.get(name)
        if was != now:
            raise ConfigError(
                f"{path} was measured with {name} {was!r}, and here it is {now!r}; go on where it was begun, or give "
                "another file without --resume"
            )
