"""`specdec demo`: Hugging Face's generate, plain decoding and each drafter on six prompts, side by side."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.cli.demo_prompts import PROMPTS
from specdec.cli.options import OutputFile, given_command, make_llm, model_options
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.llm import LLM
    from specdec.outputs import Completion

T = TypeVar("T")
ALLOWED_MARGIN = 1e-4
"""In fp32 a token may differ from Hugging Face's only where its two best logits are closer than this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter's result on a prompt. Speeds are tokens a second; a margin is set where tokens differ from HF's."""

    prompt: str
    drafter: str
    num_tokens: int
    identical: bool
    margin: float | None
    hf: float
    plain: float
    speculative: float
    mean_acceptance_length: float
    acceptance_by_depth: list[float]


@click.command()
@model_options
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, help="Most tokens an answer.")
@click.option("--json", "json_path", type=OutputFile(), help="Also write a JSON file.")
def demo(max_new_tokens: int, json_path: Path | None, **options: Any) -> None:
    """Show on six prompts that the tokens are the same and what speculation gains.

    Without --drafter n-grams are shown and, where heads are shipped for the model, those heads and both together.
    """
    from rich.console import Console

    console = Console()
    plain, drafted = _open(options)
    names = ", ".join(llm.engine.drafter.name for llm in drafted)
    console.print(f"model {plain.name}, drafter {names}, {plain.engine.model.device}, greedy")
    rows: list[Row] = []
    shown: tuple[LLM, Completion] | None = None
    with console.status("warming up") as status:
        _race(plain, drafted, "warm-up", "Say hello.", 8)
        for name, prompt in PROMPTS.items():
            status.update(f"running {name!r} ({1 + list(PROMPTS).index(name)} of {len(PROMPTS)})")
            for llm, (row, completion) in zip(
                drafted, _race(plain, drafted, name, prompt, max_new_tokens), strict=True
            ):
                rows.append(row)
                if shown is None or row.mean_acceptance_length == max(r.mean_acceptance_length for r in rows):
                    shown = llm, completion
    _print_table(console, rows)
    assert shown is not None
    _print_coloured(console, *shown)
    if json_path:
        _write_json(json_path, plain, rows)


def _open(options: dict[str, Any]) -> "tuple[LLM, list[LLM]]":
    """The model without a drafter, and with each one that is to be shown: an engine each, on the same weights."""
    from specdec.drafters.heads import base_fingerprint
    from specdec.drafters.shipped import NAMES, shipped_folder
    from specdec.llm import LLM

    first = make_llm(options | {"drafter": "ngram" if options["drafter"] == "auto" else options["drafter"]})
    names: list[str] = []
    if options["drafter"] == "auto" and shipped_folder(base_fingerprint(first.hf_model)):
        names += NAMES
    plain, *others = (LLM(first.hf_model, name, tokenizer=first.tokenizer) for name in ("none", *names))
    plain.name = first.name
    return plain, [first, *others]


def _race(
    plain: "LLM", drafted: "list[LLM]", name: str, prompt: str, max_new_tokens: int
) -> "list[tuple[Row, Completion]]":
    """Answer one prompt by Hugging Face, without drafts and with each drafter, one after the other."""
    from specdec.params import SamplingParams

    ids = plain.encode_chat([{"role": "user", "content": prompt}])
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for llm in (plain, *drafted):
        llm.engine.reset_prefix_cache()  # each computes the whole prompt, as Hugging Face does
    hf_tokens, hf_seconds = _timed(lambda: _hf_generate(plain, ids, max_new_tokens))
    answer, seconds = _timed(lambda: plain.generate(ids, params)[0])
    results = []
    for llm in drafted:
        fast, fast_seconds = _timed(lambda llm=llm: llm.generate(ids, params)[0])  # type: ignore[misc]
        _check_equal(llm, name, ids, answer.token_ids, fast.token_ids)
        identical = fast.token_ids == hf_tokens
        row = Row(
            prompt=name,
            drafter=llm.engine.drafter.name,
            num_tokens=len(fast.token_ids),
            identical=identical,
            margin=None if identical else _margin(llm, ids, hf_tokens, fast.token_ids),
            hf=len(hf_tokens) / hf_seconds,
            plain=len(answer.token_ids) / seconds,
            speculative=len(fast.token_ids) / fast_seconds,
            mean_acceptance_length=fast.stats.mean_acceptance_length,
            acceptance_by_depth=fast.stats.acceptance_by_depth,
        )
        results.append((row, fast))
    return results


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _hf_generate(llm: "LLM", ids: list[int], max_new_tokens: int) -> list[int]:
    import torch

    inputs = torch.tensor([ids], device=llm.hf_model.device)
    mask = torch.ones_like(inputs)
    out = llm.hf_model.generate(inputs, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def _check_equal(llm: "LLM", name: str, ids: list[int], plain: list[int], fast: list[int]) -> None:
    """In fp32 and above a drafter's answer differs from plain decoding at most where two logits are all but equal.

    Raises:
        SpecdecError: it differs elsewhere.
    """
    import torch

    if fast == plain or llm.hf_model.dtype not in (torch.float32, torch.float64):
        return
    if (margin := _margin(llm, ids, plain, fast)) >= ALLOWED_MARGIN:
        raise SpecdecError(
            f"{name}: with drafter {llm.engine.drafter.name!r} other tokens came than without, where the two best "
            f"logits are {margin:.1e} apart; this is a fault of specdec, please report it"
        )


def _margin(llm: "LLM", ids: list[int], one: list[int], other: list[int]) -> float:
    """Gap between the two best logits where two answers first differ."""
    import torch

    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    with torch.inference_mode():
        inputs = torch.tensor([ids + one[:same]], device=llm.hf_model.device)
        best = llm.hf_model(inputs).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def _print_table(console: "Console", rows: list[Row]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(
        title="tokens a second; × is spec against HF generate", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for heading in ("prompt", "drafter"):
        table.add_column(heading, no_wrap=True, min_width=10)
    for heading in ("= HF", "HF", "plain", "spec", "×", "τ"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(4, len(heading)))
    table.add_column("by depth", no_wrap=True)
    before = ""
    for r in rows:
        first = r.prompt != before
        speeds = [f"{r.hf:.1f}" if first else "", f"{r.plain:.1f}" if first else "", f"{r.speculative:.1f}"]
        ratio, tau = f"{r.speculative / r.hf:.2f}", f"{r.mean_acceptance_length:.2f}"
        depths = " ".join(f"{x:.2f}".removeprefix("0") for x in r.acceptance_by_depth[:2])
        same = "yes" if r.identical else "no"
        table.add_row(r.prompt if first else "", r.drafter, same, *speeds, ratio, tau, depths)
        before = r.prompt
    console.print(table)
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in _gains(rows).items())
    console.print(f"times as fast as plain decoding, geometric mean over the prompts: {gains}")
    for r in rows:
        if r.margin is not None:
            console.print(
                f"{r.prompt}, {r.drafter}: differs from HF where the two best logits are {r.margin:.1e} apart"
            )


def _gains(rows: list[Row]) -> dict[str, float]:
    """Geometric mean over the prompts, by drafter, of the speed against plain decoding."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row.drafter, []).append(row.speculative / row.plain)
    return {name: geometric_mean(some) for name, some in ratios.items()}


def _print_coloured(console: "Console", llm: "LLM", completion: "Completion") -> None:
    """Print an answer with the accepted draft tokens in green."""
    from rich.text import Text

    from specdec.engine.text import IncrementalDetokenizer
    from specdec.outputs import TARGET

    assert llm.tokenizer is not None, "a chat template came from it"
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    text = Text()
    for token, proposer in zip(completion.token_ids, completion.proposers, strict=True):
        text.append(detokenizer.push(token), style="" if proposer == TARGET else "bold green")
    text.append(detokenizer.finish())
    console.print(f"\nOne answer, the tokens that {llm.engine.drafter.name!r} guessed in green:\n")
    console.print(text)


def _write_json(path: Path, llm: "LLM", rows: list[Row]) -> None:
    import platform

    import torch
    import transformers

    from specdec.bench.results import write_json

    result = {
        "command": given_command(),
        "model": llm.name,
        "gain_over_plain": _gains(rows),
        "device": str(llm.engine.model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(path, result)
