"""Perplexity of a model on held-out text with every format of the KV cache, against native pages.

    python benchmarks/cache_quality.py --json benchmarks/results/cache_quality.json

Each of the texts under `benchmarks/texts/` is one sequence, whose tokens attend to the stored keys and values of all
tokens before, as in an engine; the perplexity is that of all texts' tokens but their first. Its change comes with the
standard error of the tokens' paired differences, and with the mean KL divergence from native pages: what the logarithm
would change by if the native model were right about the text.
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
CHUNK = 128
FORMATS = "fp8,int8:32,int8:64,int8:128,int4:32,int4:64,int4:128"
Format = tuple[str, int | None]
"""Value of kv_cache_dtype, and of kv_group_size."""


class Tally:
    """What one format does to the texts' tokens, beside native pages."""

    def __init__(self) -> None:
        self.nats: list[Tensor] = []
        self.native: list[Tensor] = []
        self.kl: list[Tensor] = []

    def add(self, logits: Tensor, native: Tensor, after: Tensor) -> None:
        """Take logits [n, V] of one chunk, those with native pages, and the tokens that follow, [n] or one less."""
        p, q = native.double().log_softmax(-1), logits.double().log_softmax(-1)
        rows = torch.arange(len(after), device=after.device)
        self.nats.append(-q[rows, after])
        self.native.append(-p[rows, after])
        self.kl.append((p.exp() * (p - q)).sum(-1))

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
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
def main(models: str, formats: str, device: str, dtype: str, path: str | None) -> None:
    """Measure the perplexity of each model with each format."""
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    parts = [text.partition(":") for text in formats.split(",")]
    wanted: list[Format] = [(name, int(group) if group else None) for name, _, group in parts]
    results = [_measure(name, wanted, place, kind) for name in models.split(",")]
    if path:
        arguments = [a for a in sys.argv[1:] if a != "--json" and a != path]
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


def _measure(name: str, wanted: Sequence[Format], device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    loaded = load(name, dtype=dtype, device=device)
    model, tokenizer = make_target(loaded.model), loaded.tokenizer
    assert tokenizer is not None, "the texts need the model's tokenizer"
    native = model.kv_layout
    layouts = {f: native.stored_as(*f) for f in wanted if native.head_dim % (f[1] or 1) == 0}
    tallies = {f: Tally() for f in layouts}
    for path in sorted(TEXTS.glob("*.txt")):
        ids: list[int] = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: model.max_len]
        click.echo(f"{name}: {path.name}, {len(ids)} tokens")
        after = torch.tensor(ids[1:], device=device).split(CHUNK)
        scores = [_score(model, ids, layout) for layout in (native, *layouts.values())]
        for tokens, want, *got in zip(after, *scores, strict=False):  # behind the last token stands nothing
            for tally, logits in zip(tallies.values(), got, strict=True):
                tally.add(logits, want, tokens)
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


def _score(model: PackedModel, ids: Sequence[int], layout: KVLayout) -> Iterator[Tensor]:
    pages = KVPages(layout, -(-len(ids) // 16), 16, model.device)
    return score(model, ids, pages, CHUNK)


if __name__ == "__main__":
    main()
