"""Writes measured figures into README and docs, from the committed results: `make tables`.

A place for figures is `<!-- measured: NAME -->…<!-- end -->`, NAME one of `TABLES`. What stands between is replaced.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_NONE_YET = "No such result is committed yet."
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- measured: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """Return README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str) -> str:
    """Return a document with what the results say now in each of its places."""

    def figures(place: re.Match[str]) -> str:
        shown = TABLES[place[2]]()
        return place[1] + (f"\n\n{shown}\n\n" if "\n" in shown else shown) + place[4]

    return PLACE.sub(figures, text)


def read(name: str) -> Any:
    """Return a committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def demo() -> str:
    """Return what `specdec demo` measured on a CPU."""
    result = read("demo_cpu")
    which = ["prompt"] if "drafter" in result else ["prompt", "drafter"]  # one for all rows, or each its own
    headings = [*which, "tokens", "= HF", "HF tok/s", "plain", "speculative", "×", "τ"]
    rows = []
    for r in result["rows"]:
        speeds = [f"{r[key]:.1f}" for key in ("hf", "plain", "speculative")]
        same = "yes" if r["identical"] else "no"
        ratio, tau = r["speculative"] / r["hf"], r["mean_acceptance_length"]
        rows.append([*(r[name] for name in which), r["num_tokens"], same, *speeds, f"{ratio:.2f}", f"{tau:.2f}"])
    return table(headings, rows)


def demo_default() -> str:
    """Return what the default drafter gained in `specdec demo` on a CPU, against Hugging Face and our own decoding."""
    rows = []
    for r in _default_rows():
        speeds = (f"{r[key]:.1f}" for key in ("hf", "plain", "speculative"))
        gain = f"{r['speculative'] / r['hf']:.1f}×"
        rows.append([r["prompt"], *speeds, gain, "yes" if r["identical"] else "no"])
    ours = ("specdec, no drafts", "specdec")
    return table(("prompt", "`generate`, tok/s", *ours, "against `generate`", "same tokens"), rows)


def _default_rows() -> list[Any]:
    """The rows of the demo's default drafter: the last that it shows."""
    rows = read("demo_cpu")["rows"]
    return [r for r in rows if r["drafter"] == rows[-1]["drafter"]]


def dropin() -> str:
    """Return the least and the largest gain of the accelerated `model.generate`; its tokens were the same."""
    result = read("dropin_cpu")
    rows = result["rows"]
    if result["drafter"] != "ngram" or not all(row["identical"] for row in rows):
        raise ValueError("dropin_cpu.json: the pages say that n-grams gave the same tokens, and that isn't so")
    gains = sorted(row["speedup"] for row in rows)
    return f"{gains[0]:.2f} to {gains[-1]:.2f}"


def ngram_gpu() -> str:
    """Return n-gram drafts against none on a GPU, by prompt."""
    rows = read("speculation_smollm2_h200")["rows"]
    shown = ([r["prompt"], f"{r['plain']:,.0f}", f"{r['ngram']:,.0f}", f"{r['ratio']:.2f}"] for r in rows)
    return table(("prompt", "plain tok/s", "ngram tok/s", "×"), shown)


def throughput() -> str:
    """Return plain decoding on a GPU by number of requests, deterministic and not."""
    files = {"SmolLM2-135M-Instruct": "throughput_smollm2_h200", "Llama-3-8B's shape": "throughput_8b_h200"}
    rows = []
    for model, file in files.items():
        for deterministic in (True, False):
            speeds = {r["batch"]: r["tok_s"] for r in read(file)["rows"] if r["deterministic"] is deterministic}
            rows.append([model, "yes" if deterministic else "no", *(f"{speeds[n]:,.0f}" for n in (1, 8, 64))])
    return table(("model", "deterministic", "1 request", "8", "64"), rows)


def heads() -> str:
    """Return what the heads that come with the package gain over plain decoding, by device and nodes of the tree."""
    rows = []
    for device, file in {"2 CPU cores, fp32": "heads_smollm2_cpu", "H200, bf16": "heads_smollm2_h200"}.items():
        result = read(file)
        (measured,) = result["rows"]
        for nodes, r in measured["speeds"].items():
            same = "yes" if r["equal"] else "no"
            rows.append(
                [device, nodes, f"{result['plain_tok_s']:,.0f}", f"{r['tok_s']:,.0f}", f"{r['gain']:.2f}", same]
            )
    return table(("on", "nodes", "plain tok/s", "heads tok/s", "×", "same tokens"), rows)


def tau_of_heads() -> str:
    """Return τ of the shipped heads and of Medusa's, by category and temperature, and what was predicted of all."""
    (shipped,), (medusa,) = (read(name)["rows"] for name in ("heads_tau_smollm2_h200", "heads_tau_medusa_h200"))
    columns = [heads[key] for heads in (shipped, medusa) for key in ("tau_0.0", "tau_0.7")]
    rows = [[name, *(f"{column[name]:.2f}" for column in columns)] for name in columns[0]]
    shown = table(("prompts", "shipped, temperature 0", "at 0.7", "Medusa, temperature 0", "at 0.7"), rows)
    predicted = " and ".join(f"{heads['predicted']['tau']:.2f}" for heads in (shipped, medusa))
    return f"{shown}\n\nPredicted from the ranks in the greedy answers: {predicted} for all."


def prefill() -> str:
    """Return the speed of one long prompt, deterministic and by the library's products."""
    result = read("prefill_8b_h200")
    speeds = result["tok_s"]
    row = [f"{result['length']:,} tokens", *(f"{speeds[key]:,.0f}" for key in ("deterministic", "cublas"))]
    return table(("prompt", "deterministic tok/s", "library tok/s", "ratio"), [[*row, f"{speeds['ratio']:.2f}"]])


def nodes() -> str:
    """Return what a step costs by the number of nodes, on a GPU."""
    names = ("nodes_8b_h200", "nodes_8b_prepacked_h200", "nodes_8b_rows_h200")
    rows, *others = (read(name)["rows"] for name in names)
    prepacked, plain = ({r["nodes"]: f"{r['us'] / 1000:.2f}" for r in found} for found in others)
    strain = []
    if "watts" in rows[0]:  # the driver could say
        strain = [
            [f"W, of {rows[0]['limit_watts']:.0f}", *(f"{r['watts']:.0f}" for r in rows)],
            ["MHz", *(f"{r['sm_mhz']:,.0f}" for r in rows)],
        ]
    return table(
        ["nodes", *(str(r["nodes"]) for r in rows)],
        [
            ["ms a step", *(f"{r['us'] / 1000:.2f}" for r in rows)],
            ["× one node", *(f"{r['ratio']:.2f}" for r in rows)],
            *strain,
            ["ms before, on another card", *(prepacked.get(r["nodes"], "") for r in rows)],
            ["the same, weights not prepacked", *(plain.get(r["nodes"], "") for r in rows)],
        ],
    )


def property_cases() -> str:
    """Return how many random cases were run, and how many differed."""
    result = read("property")
    return f"{result['passed'] + result['failed']:,} random cases, {result['failed'] or 'none'} different"


def exact_gpu() -> str:
    """Return how many answers of the real model on a GPU differ from those of plain decoding alone."""
    result = read("exact_smollm2_h200")
    rows = [r for r in result["rows"] if r["deterministic"]]
    tokens = f"{rows[0]['prompts']} prompts of {result['tokens']} tokens"
    return f"{tokens} in {len(rows)} ways, {sum(r['different'] for r in rows) or 'no answer'} different"


def attention() -> str:
    """Return our attention against torch's on an H100."""
    return _attention("attention_h100")


def attention_h200() -> str:
    """Return the same on an H200."""
    return _attention("attention_h200")


def attention_cards() -> str:
    """Return how far H200s differ, in what their clocks decide and where torch's attention is as fast."""
    cells = []
    for name in ("attention_h200", "attention_another_h200"):
        rows = {(r["sequences"], r["nodes"], r["context"]): r for r in read(name)["rows"]}
        many, one = rows[1, 64, 32768], rows[8, 1, 32768]
        shares = f"{many['chain_share_of_copy']:.1%}", f"{many['tree_share_of_copy']:.1%}"
        torch_us = min(one["sdpa_us"], one["sdpa_folded_us"])
        cells.append([f"`{name}.json`", many["chain_us"], many["tree_us"], *shares, one["chain_us"], torch_us])
    of_many = ("64 nodes: chains, µs", "trees, µs", "chains, of a copy", "trees, of a copy")
    return table(("file", *of_many, "8 sequences: chains, µs", "torch, µs"), cells)


def _attention(name: str) -> str:
    rows = []
    for r in read(name)["rows"]:
        torch_us = min(r["sdpa_us"], r["sdpa_folded_us"])
        times = (r["chain_us"], r["tree_us"], torch_us)
        ratios = (torch_us / r["chain_us"], torch_us / r["tree_us"])
        rows.append([r["sequences"], f"{r['context']:,}", r["nodes"], *times, *(f"{x:.2f}" for x in ratios)])
    headings = ("sequences", "context", "nodes", "chains, µs", "trees, µs", "torch, µs", "× chains", "× trees")
    return table(headings, rows)


def products() -> str:
    """Return how fast our matrix products are against the library's on a GPU, by number of rows."""
    ratios: dict[tuple[str, str], dict[str, str]] = {}
    for r in read("products_h200")["rows"]:
        ratios.setdefault((r["model"], r["product"]), {})[f"{r['rows']:,}"] = f"{r['cublas'] / r['ours']:.2f}"
    counts = next(iter(ratios.values()))
    return table(("model", "product", *counts), ([*name, *found.values()] for name, found in ratios.items()))


def linear() -> str:
    """Return all matrix products of a forward on a CPU, in two orders and of prepacked weights, by number of rows."""
    rows = read("linear_cpu")["rows"]
    return table(
        ["rows", *(str(r["rows"]) for r in rows)],
        [
            ["x @ weight.T, ms", *(f"{r['f_linear_ms']:.0f}" for r in rows)],
            ["(weight @ x.T).T, ms", *(f"{r['linear_ms']:.0f}" for r in rows)],
            ["prepacked, ms", *(f"{r['prepacked_ms']:.0f}" for r in rows)],
        ],
    )


def startup() -> str:
    """Return how long a large model takes to its first tokens on each card."""
    h100, h200 = read("startup_8b_h100"), read("startup_8b_h200")
    first, fourth = ([r[key] for r in (h100, h200)] for key in ("first_token_s", "captured_and_four_tokens_s"))
    return (
        f"{first[0]:.1f} s to the first token and {fourth[0]:.1f} s to the fourth on an H100, and {first[1]:.1f} s and "
        f"{fourth[1]:.1f} s on an H200"
    )


def traffic() -> str:
    """Return how many requests of random traffic were run, and how many answers were wrong."""
    result = read("traffic")
    return f"{result['requests']:,} random requests, {result['wrong'] or 'none'} answered otherwise than alone"


def cache_quality() -> str:
    """Return what each cache format does to the perplexity of two models."""
    rows: list[list[str]] = []
    for file in ("cache_quality_fp8", "cache_quality", "cache_quality_gemma"):
        for model in read(file)["models"]:
            native = [model["model"], "native", f"{model['native_perplexity']:.2f}", "", f"{model['tokens']:,}"]
            if native not in rows:
                rows.append(native)
            for r in model["rows"]:
                name = f"{r['kv_cache_dtype']}, groups of {r['group']}"
                change = f"{r['change_percent']:+.2f}% ± {r['standard_error_percent']:.2f}"
                rows.append(["", name, f"{r['perplexity']:.2f}", change, ""])
    return table(("model", "stored as", "perplexity", "change (± standard error)", "tokens"), rows)


def cache_steps() -> str:
    """Return how long steps take with quantized pages, against native ones in the same run."""
    rows = [
        [r["kv_cache_dtype"], r["nodes"], r["bytes_per_token"] // 1024, f"{r['us'] / 1000:.1f}", f"{r['ratio']:.2f}"]
        for r in sorted(read("cache_8b_h200")["rows"], key=lambda r: r["nodes"])
    ]
    return table(("stored as", "nodes", "KiB a token", "ms a step", "× native"), rows)


def quantized_attention() -> str:
    """Return what one layer's attention takes over native pages, and over int8 and fp8 through each kernel."""
    found = {(r["sequences"], r["context"], r["nodes"], r["kv_cache_dtype"]): r for r in read("direct_h200")["rows"]}
    rows = []
    for (sequences, context, nodes, name), r in found.items():
        if name == "int8":
            fp8 = found[sequences, context, nodes, "fp8"]
            times = r["native_us"], *(x[f"{how}_us"] for x in (r, fp8) for how in ("shared", "direct", "single"))
            rows.append([sequences, f"{context:,}", nodes, *(f"{us:.0f}" for us in times)])
    ways = (f"{name}, {how}" for name in ("int8", "fp8") for how in ("values kept", "codes, 4 warps", "codes, 1 warp"))
    return table(("sequences", "context", "nodes", "bf16, µs", *ways), rows)


def wide_attention() -> str:
    """Return the same of tiles of 64 rows, with nodes as chains and as trees."""
    found = {(r["sequences"], r["context"], r["nodes"], r["kv_cache_dtype"]): r for r in read("wide_h200")["rows"]}
    rows = []
    for sequences, context, nodes, name in sorted(found):
        if name == "int8":
            r, fp8 = (found[sequences, context, nodes, name] for name in ("int8", "fp8"))
            for kind, end in ("chains", "us"), ("trees", "tree_us"):
                times = r[f"native_{end}"], *(x[f"{how}_{end}"] for x in (r, fp8) for how in ("shared", "wide"))
                rows.append([sequences, f"{context:,}", f"{nodes} in {kind}", *(f"{us:.0f}" for us in times)])
    ways = ("int8, values kept", "int8, codes kept", "fp8, values kept", "fp8, codes kept")
    return table(("sequences", "context", "nodes", "bf16, µs", *ways), rows)


def long_attention() -> str:
    """Return one layer's attention over long contexts by format, as engines run it; nodes are chains or trees."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for r in read("formats_h200")["rows"]:
        found.setdefault((r["sequences"], r["context"], r["nodes"]), {})[r["kv_cache_dtype"]] = r
    rows = []
    for (sequences, context, nodes), by_format in found.items():
        for kind in ("chain", "tree"):
            times = [f"{by_format[name][f'{kind}_us']:.0f}" for name in ("auto", "fp8", "int8", "int4")]
            rows.append([sequences, f"{context:,}", f"{nodes} in {kind}s", *times])
    return table(("sequences", "context", "nodes", "bf16, µs", "fp8", "int8", "int4"), rows)


def prefix_reuse() -> str:
    """Return serving with prefix reuse over without it, by requests a second."""
    rows = []
    for r in read("prefix_8b_h200")["rows"]:
        ratios = (f"{r['on_over_off'][key]:.2f}" for key in ("tokens_per_s", "latency_s", "first_token_s"))
        rows.append([f"{r['rate']:g}", f"{r['off']['tokens_per_s']:,.0f}", f"{r['on']['tokens_per_s']:,.0f}", *ratios])
    speeds = ("off, tok/s", "on, tok/s")
    return table(("requests a second", *speeds, "× throughput", "× latency", "× time to first token"), rows)


def runtime() -> str:
    """Return what the runtime gains: drafts under load, continuous batches, packed prompts."""
    arrivals, other = read("runtime_arrivals_smollm2_h200")["arrivals"], read("runtime_smollm2_h200")
    full, low, batches, prompts = arrivals["saturated"], arrivals["low"], other["batching"], other["prefill"]
    rows = [
        ["as many requests as it can serve, n-grams with heads against plain, tok/s", full["drafting_tok_s"],
         full["plain_tok_s"], full["ratio"]],
        ["few requests, the median time between tokens, ms", low["drafting_p50_token_ms"], low["plain_p50_token_ms"],
         low["ratio"]],
        ["continuous batches against static ones of 8, requests a second", batches["continuous_requests_s"],
         batches["static_requests_s"], batches["ratio"]],
        ["packed prompts against padded ones, tok/s", prompts["packed_prompt_tok_s"], prompts["padded_prompt_tok_s"],
         prompts["ratio"]],
    ]  # fmt: skip
    return table(("what", "with", "without", "×"), ([row[0], *map(_short, row[1:])] for row in rows))


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def acceptance() -> str:
    """Return what drafters gain by kind of work, in each committed result of `specdec bench acceptance`."""
    shown = []
    for path, result in _of_format("specdec-acceptance"):
        settings, rows = result["settings"], result["summary"]
        size = min(row["batch_size"] for row in rows)
        rows = [row for row in rows if row["batch_size"] == size and row["system"] != settings["baseline"]]
        found = {(row["name"], row["category"]): row for row in rows}
        systems, categories = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "category"))
        lines = [[category, *(_gain(found.get((name, category))) for name in systems)] for category in categories]
        how = f"{_folder(settings['model'])} in {result['environment']['dtype']} on {result['environment']['device']}, "
        how += f"temperature {settings['temperature']:g}, at most {settings['max_new_tokens']} tokens, {size} at once "
        how += f"(`{path.name}`)"
        figures = {"speedup": "Speed-up by kind of work", "depth": "Acceptance by depth"}
        drawn = [(what, f"figures/{path.stem}-{name}.png") for name, what in figures.items()]
        shown += [f"{how}:", table(("kind of work", *systems), lines)]
        shown += [f"![{what}]({figure})" for what, figure in drawn if (ROOT / "docs" / figure).exists()]
    return "\n\n".join(shown) or _NONE_YET


def acceptance_at_once() -> str:
    """Return what drafters gain over all prompts where several are answered at once, with quartiles."""
    lines = []
    for path, result in _of_format("specdec-acceptance"):
        baseline = result["settings"]["baseline"]
        rows = [row for row in result["summary"] if row["category"] == "all" and row["system"] != baseline]
        least = min(row["batch_size"] for row in rows)
        for row in rows:
            if row["batch_size"] > least:
                gain = row["speedup"]
                quartiles = f"{gain['low']:.2f} to {gain['high']:.2f}"
                lines.append([f"`{path.name}`", row["batch_size"], row["name"], f"{gain['value']:.2f}×", quartiles])
    headings = ("file", "at once", "drafter", "over everything", "quartiles over the groups")
    return table(headings, lines) if lines else _NONE_YET


def _gain(row: dict[str, Any] | None) -> str:
    """A row's speed-up, its τ where there is one, and how many answers differ, if any do."""
    if row is None or row["speedup"] is None:
        return "–"
    tau = f" (τ {row['mean_acceptance_length']:.2f})" if "mean_acceptance_length" in row else ""
    different = f", {row['num_different']} of {row['num_compared']} differ" if row["num_different"] else ""
    return f"{row['speedup']['value']:.2f}×{tau}{different}"


def seeds() -> str:
    """Return each mechanism on and off, in each committed result of `specdec bench seeds`."""
    shown = []
    for path, result in _of_format("specdec-seeds"):
        rows = [
            [r["name"], *(f"{r[key]:,.0f}" for key in ("on", "off")), r["unit"], f"{r['ratio']:.2f}", r["how"]]
            for r in result["rows"]
            if r["ratio"] is not None
        ]
        how = f"{result['model']} in {result['environment']['dtype']} on {result['environment']['device']} "
        how += f"(`{path.name}`)"
        shown.append(f"{how}:\n\n{table(('mechanism', 'on', 'off', '', '×', 'what was measured'), rows)}")
    return "\n\n".join(shown) or _NONE_YET


def serve_agreement() -> str:
    """Return the numbers of `specdec bench serve` divided by those of the server's own metrics."""
    names = {"ttft_ms": "TTFT", "inter_token_ms": "between tokens", "e2el_ms": "end to end"}
    names |= {"total_input_tokens": "prompt tokens", "total_output_tokens": "tokens"}
    rows = []
    for path, result in _of_format("specdec-serve"):
        for run in result["runs"]:
            if run["against_server"] is not None:
                ratios = (f"{run['against_server'][name]:.3f}" for name in names)
                rows.append([f"`{path.name}`", run["request_rate"] or "all at once", run["completed"], *ratios])
    return table(("file", "requests a second", "answers", *names.values()), rows) if rows else _NONE_YET


def picture() -> str:
    """Return the README's picture: speed-up by kind of work where that is measured and drawn, else the playground."""
    for path, result in _of_format("specdec-acceptance"):
        figure = ROOT / "docs" / "figures" / f"{path.stem}-speedup.png"
        if figure.exists():
            caption = (
                f"Speed-up over `{result['settings']['baseline']}` decoding by kind of work, with quartiles over the "
            )
            caption += f"prompts: {result['settings']['model']} on {result['environment']['device']} "
            caption += f"([`{path.name}`](benchmarks/results/{path.name}))."
            return f"![Speed-up by kind of work](docs/figures/{figure.name})\n\n{caption}"
    caption = "The playground of `specdec serve`: an answer with its drafted tokens coloured, beside plain decoding."
    return f"![The playground](docs/images/playground.png)\n\n{caption}"


def _folder(model: str) -> str:
    """The name of a model that was given by its folder."""
    return model.rstrip("/").rpartition("/")[2]


def _of_format(name: str) -> list[tuple[Path, Any]]:
    """The results that a command of that format wrote, by file name."""
    found = ((path, read(path.stem)) for path in sorted(RESULTS.glob("*.json")))
    return [(path, result) for path, result in found if result.get("format") == name]


def provenance() -> str:
    """Return how each committed result was made."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        result = made(read(path.stem))
        versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "triton", "transformers") if name in result)
        rows.append([f"`{path.name}`", f"`{result['command']}`", _machine(result), versions, result.get("commit", "–")])
    return table(("file", "command", "on", "versions", "commit"), rows)


def made(result: dict[str, Any]) -> dict[str, Any]:
    """The command, versions and machine of a result; the files of `specdec bench` hold them in `environment`."""
    environment = result.get("environment")
    facts = result
    if environment is not None:
        facts = environment | environment["packages"] | {"commit": environment["commit"] or "–"}
    device = str(facts.get("device", "cpu"))
    return facts | ({"card": device} if device.startswith("NVIDIA") else {})


def _machine(result: dict[str, Any]) -> str:
    if "card" in result:
        return str(result["card"])
    threads = result.get("threads")
    return f"CPU, {threads} thread{'s' * (threads > 1)}" if threads else "CPU"


_BENCH = (acceptance, acceptance_at_once, picture, seeds, serve_agreement)
_CPU = (demo, demo_default, dropin, linear)
_SPEED = (attention, attention_cards, attention_h200, heads, ngram_gpu, nodes, prefill, products, startup, throughput)
_SERVING = (cache_steps, long_attention, quantized_attention, wide_attention, prefix_reuse, runtime)
_EQUALITY = (cache_quality, exact_gpu, property_cases, tau_of_heads, traffic)
TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (*_BENCH, *_CPU, *_SPEED, *_SERVING, *_EQUALITY, provenance)
}


def main() -> None:
    """Rewrite the documents whose figures are no longer those of the results."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (new := fill(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
