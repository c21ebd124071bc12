"""Perplexity of a model on held-out text with every format of the KV cache, against native pages.

    python benchmarks/cache_quality.py --json benchmarks/results/cache_quality.json

Each of the texts under `benchmarks/texts/` is one sequence, whose tokens attend to the stored keys and values of all
tokens before, as in an engine; the perplexity is that of all texts' tokens but their first. Its change comes with the
standard error of the tokens' paired differences, and with the mean KL divergence from native pages: what the logarithm
would change by if the native model were right about the text. `--parts DIR` keeps what is done with a text there, and
takes it from there the next time: a run that was ended goes on.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
import transformers
from torch import Tensor

from specdec.cache.pages import KVLayout, KVPages
from specdec.hub.load import load
from specdec.llm import resolve_device, resolve_dtype
from specdec.models.cachecheck import check_cache, score
from specdec.models.load import make_target
from specdec.models.protocol import PackedModel

TEXTS = Path(__file__).parent / "texts"
CHUNK = 256
FORMATS = "fp8,fp8_e4m3,int8:32,int8:64,int8:128,int4:32,int4:64,int4:128"
Format = tuple[str, int | None]
"""Value of kv_cache_dtype, and of kv_group_size."""


class Tally:
    """What one format does to the texts' tokens, beside native pages."""

    def __init__(self) -> None:
        self.nats: list[Tensor] = []
        self.native: list[Tensor] = []
        self.kl: list[Tensor] = []

    def add(self, logits: Tensor, native: Tensor, after: Tensor) -> None:
        """Take a chunk's logits [n, V], log-probabilities with native pages, and the next tokens, [n] or less."""
        logprobs = logits.float().log_softmax(-1)
        rows = torch.arange(len(after), device=after.device)
        self.nats.append(-logprobs[rows, after].double())
        self.native.append(-native[rows, after].double())
        self.kl.append((native.exp() * (native - logprobs)).sum(-1).double())

    def part(self) -> list[Tensor]:
        """All that was taken, and what a tally can be made of again."""
        return [torch.cat(side).cpu() for side in (self.nats, self.native, self.kl)]

    def join(self, part: list[Tensor]) -> None:
        """Take what another tally took."""
        for side, more in zip((self.nats, self.native, self.kl), part, strict=True):
            side.append(more)

    def row(self) -> dict[str, object]:
        """Perplexity, its change with the standard error of the paired difference, and the mean KL."""
        nats, native = torch.cat(self.nats), torch.cat(self.native)
        more = nats - native
        change, error = more.mean().expm1(), more.std() / len(more) ** 0.5
        return {
            "perplexity": round(float(nats.mean().exp()), 4),
            "change_percent": round(100 * float(change), 3),
            "standard_error_percent": round(100 * float(error), 3),
            "kl_nats": float(f"{float(torch.cat(self.kl).mean()):.3g}"),
        }


@click.command()
@click.option("--models", default="smollm2-135m", show_default=True, help="Comma-separated.")
@click.option(
    "--formats", default=FORMATS, show_default=True, help="With group sizes; those that don't fit are left out."
)
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
@click.option("--parts", type=click.Path(file_okay=False, path_type=Path), help="Where texts' figures are kept.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
def main(models: str, formats: str, device: str, dtype: str, parts: Path | None, path: str | None) -> None:
    """Measure the perplexity of each model with each format."""
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    named = [text.partition(":") for text in formats.split(",")]
    wanted: list[Format] = [(name, int(group) if group else None) for name, _, group in named]
    results = [_measure(name, wanted, place, kind, parts) for name in models.split(",")]
    if path:
        arguments = [a for a in sys.argv[1:] if a not in ("--json", path, "--parts", str(parts))]
        facts = {
            "command": " ".join(["python", "benchmarks/cache_quality.py", *arguments]),
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
            "dtype": str(kind).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**facts, "models": results}, file, indent=1)
            file.write("\n")


def _measure(
    name: str, wanted: Sequence[Format], device: torch.device, dtype: torch.dtype, parts: Path | None
) -> dict[str, object]:
    loaded = load(name, dtype=dtype, device=device)
    model, tokenizer = make_target(loaded.model), loaded.tokenizer
    assert tokenizer is not None, "the texts need the model's tokenizer"
    native = model.kv_layout
    layouts = {f: native.stored_as(*f) for f in wanted if native.head_dim % (f[1] or 1) == 0}
    tallies = {f: Tally() for f in layouts}
    for path in sorted(TEXTS.glob("*.txt"), key=lambda path: path.stat().st_size):
        ids: list[int] = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: model.max_len]
        kept = {f: parts and parts / f"{name}-{f[0]}-{f[1]}-{path.stem}.pt" for f in layouts}
        missing = {f: layout for f, layout in layouts.items() if not ((at := kept[f]) and at.exists())}
        click.echo(f"{name}: {path.name}, {len(ids)} tokens, {len(missing)} formats")
        done = _run(model, ids, missing) if missing else {}
        for f, tally in tallies.items():
            at = kept[f]
            if at and f in done:
                at.parent.mkdir(parents=True, exist_ok=True)
                torch.save(done[f], at)
            tally.join(done[f] if f in done else torch.load(at, weights_only=True))
    rows: list[dict[str, object]] = []
    for (kv_cache_dtype, group), tally in tallies.items():
        report = check_cache(model, layouts[kv_cache_dtype, group], tokenizer)
        row: dict[str, object] = {"kv_cache_dtype": kv_cache_dtype, "group": group or native.head_dim}
        row |= {"bytes_per_head": layouts[kv_cache_dtype, group].bytes_per_head, **tally.row()}
        row |= {"check_kl": float(f"{report.kl:.3g}"), "check_key_outlier": round(report.key_outlier, 1)}
        click.echo(f"{name}: {row}")
        rows.append(row)
    tokens, perplexity = torch.cat(tally.native), float(torch.cat(tally.native).mean().exp())
    facts = {"head_dim": native.head_dim, "tokens": len(tokens), "native_perplexity": round(perplexity, 4)}
    return {"model": name, **facts, "rows": rows}


def _run(model: PackedModel, ids: Sequence[int], layouts: dict[Format, KVLayout]) -> dict[Format, list[Tensor]]:
    """One text with native pages and with those of each layout."""
    tallies = {f: Tally() for f in layouts}
    after = torch.tensor(ids[1:], device=model.device).split(CHUNK)
    scores = [_score(model, ids, layout) for layout in (model.kv_layout, *layouts.values())]
    for tokens, want, *got in zip(after, *scores, strict=False):  # behind the last token stands nothing
        logprobs = want.float().log_softmax(-1)
        for tally, logits in zip(tallies.values(), got, strict=True):
            tally.add(logits, logprobs, tokens)
    return {f: tally.part() for f, tally in tallies.items()}


def _score(model: PackedModel, ids: Sequence[int], layout: KVLayout) -> Iterator[Tensor]:
    pages = KVPages(layout, -(-len(ids) // 16), 16, model.device)
    return score(model, ids, pages, CHUNK)


if __name__ == "__main__":
    main()
