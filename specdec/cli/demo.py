"""`specdec demo`: Hugging Face's generate, plain decoding and speculation on six prompts, side by side."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.cli.demo_prompts import PROMPTS
from specdec.cli.options import make_llm, model_options

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.llm import LLM
    from specdec.outputs import Completion

T = TypeVar("T")
ALLOWED_MARGIN = 1e-4
"""In fp32 a token may differ from Hugging Face's only where its two best logits are closer than this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt's result. Speeds are tokens a second; a margin is set where tokens differ from Hugging Face's."""

    prompt: str
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
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write a JSON file.")
def demo(max_new_tokens: int, json_path: str | None, **options: Any) -> None:
    """Show on six prompts that the tokens are the same and what speculation gains."""
    from rich.console import Console

    console = Console()
    llm = make_llm(options)
    console.print(f"model {llm.name}, drafter {llm.engine.drafter.name}, {llm.engine.model.device}, greedy")
    rows: list[Row] = []
    shown: Completion | None = None
    with console.status("warming up") as status:
        _race(llm, "warm-up", "Say hello.", 8)
        for name, prompt in PROMPTS.items():
            status.update(f"running {name!r} ({len(rows) + 1} of {len(PROMPTS)})")
            row, completion = _race(llm, name, prompt, max_new_tokens)
            rows.append(row)
            if shown is None or row.mean_acceptance_length == max(r.mean_acceptance_length for r in rows):
                shown = completion
    _print_table(console, rows)
    assert shown is not None
    _print_coloured(console, llm, shown)
    if json_path:
        _write_json(json_path, llm, rows, max_new_tokens)


def _race(llm: "LLM", name: str, prompt: str, max_new_tokens: int) -> tuple[Row, "Completion"]:
    """Answer one prompt in the three ways, one after the other."""
    from specdec.drafters.none import NoDrafter
    from specdec.params import SamplingParams

    ids = llm.encode_chat([{"role": "user", "content": prompt}])
    params = SamplingParams(max_new_tokens=max_new_tokens)
    hf_tokens, hf_seconds = _timed(lambda: _hf_generate(llm, ids, max_new_tokens))
    drafter = llm.engine.drafter
    llm.engine.drafter = NoDrafter()
    try:
        plain, plain_seconds = _timed(lambda: llm.generate(ids, params)[0])
    finally:
        llm.engine.drafter = drafter
    fast, fast_seconds = _timed(lambda: llm.generate(ids, params)[0])
    assert fast.token_ids == plain.token_ids or _margin(llm, ids, plain.token_ids, fast.token_ids) < ALLOWED_MARGIN
    identical = fast.token_ids == hf_tokens
    row = Row(
        prompt=name,
        num_tokens=len(fast.token_ids),
        identical=identical,
        margin=None if identical else _margin(llm, ids, hf_tokens, fast.token_ids),
        hf=len(hf_tokens) / hf_seconds,
        plain=len(plain.token_ids) / plain_seconds,
        speculative=len(fast.token_ids) / fast_seconds,
        mean_acceptance_length=fast.stats.mean_acceptance_length,
        acceptance_by_depth=fast.stats.acceptance_by_depth,
    )
    return row, fast


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


def _margin(llm: "LLM", ids: list[int], one: list[int], other: list[int]) -> float:
    """Gap between the two best logits where two answers first differ."""
    import torch

    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    with torch.inference_mode():
        inputs = torch.tensor([ids + one[:same]], device=llm.hf_model.device)
        best = llm.hf_model(inputs).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def _print_table(console: "Console", rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(title="tokens a second; × is spec against HF generate", title_justify="left")
    table.add_column("prompt", no_wrap=True, min_width=10)
    for heading in ("tokens", "= HF", "HF", "plain", "spec", "×", "τ"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(4, len(heading)))
    table.add_column("by depth", no_wrap=True)
    for r in rows:
        speeds = [f"{x:.1f}" for x in (r.hf, r.plain, r.speculative)]
        ratio, tau = f"{r.speculative / r.hf:.2f}", f"{r.mean_acceptance_length:.2f}"
        depths = " ".join(f"{x:.2f}".removeprefix("0") for x in r.acceptance_by_depth[:3])
        table.add_row(r.prompt, str(r.num_tokens), "yes" if r.identical else "no", *speeds, ratio, tau, depths)
    console.print(table)
    for r in rows:
        if r.margin is not None:
            console.print(f"{r.prompt}: differs from HF where the two best logits are {r.margin:.1e} apart")


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


def _write_json(path: str, llm: "LLM", rows: list[Row], max_new_tokens: int) -> None:
    import platform

    import torch
    import transformers

    result = {
        "command": f"specdec demo --max-new-tokens {max_new_tokens}",
        "model": llm.name,
        "drafter": llm.engine.drafter.name,
        "device": str(llm.engine.model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
