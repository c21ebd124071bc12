"""Draft heads that come with the package, found by the base that they were trained for."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from specdec.drafters.heads import CONFIG_FILE, base_of_heads, heads_kind
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter, DraftTarget
from specdec.drafters.registry import make_drafter
from specdec.errors import ConfigError

FOLDER = Path(str(files("specdec"))) / "heads"
"""Holds one heads folder for each base."""

NAMES = ("shipped", "ngram+shipped")
"""The drafters that use shipped heads."""
AUTO = "ngram+shipped"
"""The drafter that "auto" takes where there are heads for the model: n-grams where a match is long, else heads. It was
faster than either alone over the demo's prompts on a CPU (`benchmarks/results/demo_cpu.json`), and over all prompts of
the benchmark, one at a time, on a GPU (`acceptance_h200.json`)."""
NODES = {"cpu": 6}
"""Most nodes of a tree where nobody says how many; other devices take all that were stored. On a CPU large trees cost
more than they bring (`benchmarks/results/heads_smollm2_cpu.json`)."""
MIN_CHANCES = {"cpu": 0.08}
"""Least chance of a node where nobody says how many: there trees grow (`specdec.drafters.grown_tree`). A row costs a
twentieth of a step, a level of the draft half of that, so a node below pays for itself at best."""


def shipped_folder(fingerprint: str) -> Path | None:
    """Return the folder of the heads that were trained for a base, or None if there are none.

    Args:
        fingerprint: the base's, as `specdec.drafters.heads.base_fingerprint` computes it.
    """
    found = (file.parent for file in sorted(FOLDER.glob(f"*/{CONFIG_FILE}")))
    return next((folder for folder in found if base_of_heads(folder) == fingerprint), None)


def load_shipped(
    target: DraftTarget, *, tree: Sequence[Sequence[int]] | None = None, max_nodes: int | None = None
) -> HeadsDrafter:
    """Load the heads that come with the package for the target, of whatever kind they are.

    Args:
        target: the model to draft for.
        tree, max_nodes: as for the drafters of the kind; without either `NODES` and `MIN_CHANCES` limit the trees.

    Raises:
        ConfigError: there are none for this model, or an option is out of bounds.
        CheckpointError: they are damaged.
    """
    return load_shipped_of("medusa", target, tree=tree, max_nodes=max_nodes)


def load_shipped_of(
    kind: str, target: DraftTarget, *, tree: Sequence[Sequence[int]] | None = None, max_nodes: int | None = None
) -> HeadsDrafter:
    """Load the heads that come with the package for the target, if they are of a kind.

    Args:
        kind: one of `specdec.drafters.heads.KINDS`; "medusa" takes any kind, as `specdec train medusa` makes them all.
        target, tree, max_nodes: as for `load_shipped`.

    Raises:
        ConfigError, CheckpointError: as for `load_shipped`, or they are of another kind.
    """
    folder = shipped_folder(target.fingerprint)
    if folder is None:
        raise ConfigError(
            "no heads come with the package for this model; train some with `specdec train medusa` and write "
            f'"{kind}:PATH"'
        )
    if kind not in ("medusa", heads_kind(folder)):
        raise ConfigError(
            f"the heads that come with the package for this model are of the kind {heads_kind(folder)!r}, not "
            f'{kind!r}; write "shipped" for those, or "{kind}:PATH" for others'
        )
    grows = max_nodes is None and tree is None
    most = NODES.get(target.device.type) if grows else max_nodes
    drafter = make_drafter(f"{heads_kind(folder)}:{folder}", target, tree=tree, max_nodes=most)
    assert isinstance(drafter, HeadsDrafter)
    drafter.min_chance = MIN_CHANCES.get(target.device.type) if grows else None
    return drafter


def auto(target: DraftTarget | None = None) -> Drafter:
    """Return the default drafter: what `AUTO` says where heads are shipped for the target, else n-grams."""
    if target is None or shipped_folder(target.fingerprint) is None:
        return NGramDrafter()
    return make_drafter(AUTO, target)
