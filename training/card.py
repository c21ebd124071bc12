"""The model card of trained heads: what they are, how they were made, what was measured. Knows files and figures.

The facts are kept in `card.json` beside the heads; `README.md` is made of them, anew whenever some are added.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.drafters.draft_heads import HeadsConfig
from specdec.errors import CheckpointError
from specdec.hub.cache import replace_file

CARD_FILE = "README.md"
FACTS_FILE = "card.json"


def add_facts(folder: Path, config: HeadsConfig, **facts: Mapping[str, Any]) -> None:
    """Add facts to the card of a heads folder, in place of those of the same name, and write it anew.

    Args:
        folder: the heads' folder.
        config: theirs.
        facts: `training` with base, licence, command, data, examples, held_out, labels, steps, batch_tokens, lr, decay,
            soft_labels, seed and, where they are known, peak_bytes, top1 and top5; or `tau` with nodes,
            prompts, num_tokens, predicted, measured and by_category.

    Raises:
        CheckpointError: the facts that are there can't be read.
        OSError: a file can't be written.
    """
    path = folder / FACTS_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known |= facts
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: isn't a JSON object ({error}); remove it, and the card begins anew") from error
    text = json.dumps(known, indent=1) + "\n"
    replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    card = render(config, known)
    replace_file(folder / CARD_FILE, lambda file: file.write_text(card, encoding="utf-8"))


def render(config: HeadsConfig, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a card as Markdown.

    Args:
        config: the heads'.
        facts: as for `add_facts`; what is missing is left out.
    """
    training, tau = facts.get("training"), facts.get("tau")
    parts = [_heading(config, training)]
    if training is not None:
        parts.append(_training(training))
    if tau is not None:
        parts.append(_tau(tau))
    return "\n".join(parts)


def _heading(config: HeadsConfig, training: Mapping[str, Any] | None) -> str:
    base = f"base {config.base_fingerprint}" if training is None else training["base"]
    scored = f"{config.draft_vocab} of " if config.draft_vocab is not None else ""
    licence = "" if training is None else f"| licence | {training['licence']} |\n"
    return f"""# {config.kind.title()} draft heads for {base}

Heads that guess the next tokens of {base} for speculative decoding with specdec. What is said stays what the model
alone would say; the heads change the speed.

| | |
|---|---|
| fingerprint of the base | `{config.base_fingerprint}` |
| kind, heads | {config.kind}, {config.num_heads} |
| residual blocks a head | {config.num_layers} |
| width of the MLPs | {config.width or "–"} |
| projection | {config.projection}, over {scored}{config.vocab_size} tokens |
{licence}"""


def _training(facts: Mapping[str, Any]) -> str:
    soft = ", soft labels" if facts["soft_labels"] else ""
    text = f"""## Training

```sh
{facts["command"]}
```

- Data: {facts["data"]}. {facts["examples"]} examples with {facts["labels"]} answer tokens, {facts["held_out"]} more \
held out.
- {facts["steps"]} steps of at most {facts["batch_tokens"]} tokens, AdamW, learning rate {facts["lr"]}, loss of \
head k × {facts["decay"]}^k{soft}, seed {facts["seed"]}; the base stayed as it was.
"""
    if "peak_bytes" in facts:
        text += f"- Peak memory {facts['peak_bytes'] / 1e9:.1f} GB.\n"
    if "top1" not in facts:
        return text
    rows = [f"| {k} | {a:.3f} | {b:.3f} |" for k, (a, b) in enumerate(zip(facts["top1"], facts["top5"], strict=True))]
    columns = "| head | the first candidate | among the first five |\n|---|---|---|"
    return "\n".join([text, "On the held-out examples the token is", "", columns, *rows, ""])


def _tau(facts: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {tau:.2f} |" for name, tau in facts["by_category"].items()]
    return "\n".join(
        [
            f"""## Tokens per forward of the model

Measured by the engine at temperature 0 with a tree of {facts["nodes"]} nodes, on {facts["prompts"]} held-out prompts
({facts["num_tokens"]} tokens): {facts["measured"]:.3f}, where {facts["predicted"]:.3f} was predicted.
""",
            *(["| prompts | τ |", "|---|---|", *rows, ""] if rows else []),
        ]
    )
