"""Draft heads on prompts that they were never trained on: τ by category, greedy and sampling, and what it is worth.

    python benchmarks/heads.py HEADS_FOLDER … --json benchmarks/results/heads_smollm2_h100.json

τ counts the bonus token and the prompt's own forward. Speeds are of one request at a time, end to end, prompt included,
against plain decoding in the same run, each the best of a few; trees are cut to several sizes.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import click
import torch
import transformers

from specdec import LLM, SamplingParams
from specdec.outputs import Completion
from specdec.training.check import check_tau

PROMPTS = Path(__file__).parent / "prompts"
REPEATS = 3


def read_prompts(folder: Path) -> dict[str, list[list[dict[str, str]]]]:
    """Conversations by category: each JSONL file of the folder is one."""
    return {
        path.stem: [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def tau(completions: Iterable[Completion]) -> float:
    """Tokens a forward over all answers."""
    stats = [c.stats for c in completions]
    return round(sum(s.num_output_tokens for s in stats) / sum(s.num_forwards for s in stats), 3)


def taus(llm: LLM, prompts: dict[str, list[list[int]]], tokens: int, temperature: float) -> dict[str, float]:
    """τ of each category, and of all answers."""
    flat = [(name, ids) for name, some in prompts.items() for ids in some]
    params = [SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=i) for i in range(len(flat))]
    by_category = defaultdict(list)
    for (name, _), completion in zip(flat, llm.generate([ids for _, ids in flat], params), strict=True):
        by_category[name].append(completion)
    found = {name: tau(some) for name, some in by_category.items()}
    return found | {"all": tau(c for some in by_category.values() for c in some)}


def seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of each prompt, one at a time, the best of a few runs; and the answers."""
    times, answers = [], []
    for ids in prompts:
        runs = []
        for _ in range(REPEATS + 1):  # the first one may compile and capture
            start = time.perf_counter()
            (completion,) = llm.generate([ids], SamplingParams(max_new_tokens=tokens))
            runs.append(time.perf_counter() - start)
        times.append(min(runs[1:]))
        answers.append(completion.token_ids)
    return times, answers


@click.command()
@click.argument("folders", nargs=-1, required=True)
@click.option("--model", default="smollm2-135m")
@click.option("--tokens", default=128)
@click.option("--timed", default=2, help="Prompts of each category that are timed.")
@click.option("--sizes", default="8,16,32,64", help="Nodes of the trees that are timed.")
@click.option("--prompts", "folder", default=PROMPTS, type=click.Path(path_type=Path))
@click.option("--json", "path", type=click.Path(dir_okay=False))
def main(
    folders: tuple[str, ...], model: str, tokens: int, timed: int, sizes: str, folder: Path, path: str | None
) -> None:
    """Measure heads."""
    plain = LLM(model, "none", max_num_seqs=1)
    prompts = {name: [plain.encode_chat(messages) for messages in some] for name, some in read_prompts(folder).items()}
    some = [ids for ids_of in prompts.values() for ids in ids_of[:timed]]
    base, want = seconds(plain, some, tokens) if timed else ([], [])
    rows = []
    for heads in folders:

        def opened(nodes: int, seqs: int, heads: str = heads) -> LLM:
            options = {"max_nodes": nodes}
            name = f"{json.loads((Path(heads) / 'config.json').read_text())['kind']}:{heads}"
            return LLM(
                plain.hf_model,
                name,
                tokenizer=plain.tokenizer,
                drafter_options=options,
                max_num_seqs=seqs,
                cost_table=None,
            )

        many = opened(64, 16)
        row: dict[str, object] = {"heads": Path(heads).name}
        row |= {f"tau_{t}": taus(many, prompts, tokens, t) for t in (0.0, 0.7)}
        click.echo(str(row))
        check = check_tau(
            lambda ids, llm=many: llm.generate(ids, SamplingParams(max_new_tokens=tokens)),
            plain.hf_model,
            many.engine.drafter._guesses._heads,  # type: ignore[attr-defined]
            many.engine.drafter.choices,  # type: ignore[attr-defined]
            [ids for ids_of in prompts.values() for ids in ids_of],
        )
        row["predicted"] = {"tau": round(check.predicted, 3), "measured": round(check.measured, 3)}
        row["predicted"]["difference"] = round(check.difference, 4)  # type: ignore[index]
        speeds = {}
        for nodes in map(int, sizes.split(",")) if timed else ():
            times, answers = seconds(opened(nodes, 1), some, tokens)
            speeds[nodes] = {
                "gain": round(sum(base) / sum(times), 3),
                "tok_s": round(sum(map(len, answers)) / sum(times), 1),
                "equal": answers == want,
            }
            click.echo(f"{nodes} nodes: {speeds[nodes]}")
        rows.append(row | {"speeds": speeds})
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "command": " ".join(["python", "benchmarks/heads.py", *(a for a in sys.argv[1:] if a not in ("--json", path))]),
        "card": card,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": model,
        "tokens": tokens,
        "prompts": {name: len(ids_of) for name, ids_of in prompts.items()},
        "plain_tok_s": round(sum(map(len, want)) / sum(base), 1) if timed else None,
        "rows": rows,
    }
    click.echo(json.dumps(result))
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
