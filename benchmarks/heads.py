"""Draft heads on prompts that they were never trained on: τ by category, greedy and sampling, and what it is worth.

    python benchmarks/heads.py HEADS_FOLDER … --json benchmarks/results/heads_smollm2_h200.json

τ counts the bonus token and the prompt's own forward, and is that of the whole tree, measured on many prompts at once.
Beside it stand what the trainer predicts of these very answers (`tau`), the mean over all their positions, how often
the first candidate and one of the first five is right, and what was expected where the tree was made; `scored` is the
share of the answers' tokens that the heads' draft vocabulary holds. Speeds are of one request at a time against plain
decoding in the same run, from the first token on and with the prompt; trees are cut to some sizes.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import transformers

from specdec import LLM, SamplingParams
from specdec.bench.counts import total
from specdec.bench.dataset import load_prompts
from specdec.drafters.draft_heads import DraftHeads
from specdec.outputs import Completion
from specdec.training.check import check_tau

REPEATS = 3


def tau(completions: Iterable[Completion]) -> float:
    """Tokens a forward over all answers."""
    return round(total(c.stats for c in completions).mean_acceptance_length, 3)


def taus(llm: LLM, prompts: dict[str, list[list[int]]], tokens: int, temperature: float) -> dict[str, float]:
    """τ of each category, and of all answers."""
    flat = [(name, ids) for name, some in prompts.items() for ids in some]
    params = [SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=i) for i in range(len(flat))]
    by_category = defaultdict(list)
    for (name, _), completion in zip(flat, llm.generate([ids for _, ids in flat], params), strict=True):
        by_category[name].append(completion)
    found = {name: tau(some) for name, some in by_category.items()}
    return found | {"all": tau(c for some in by_category.values() for c in some)}


@dataclass(frozen=True)
class Timed:
    """How long prompts took, one at a time, the best of a few runs each.

    Args:
        decoding: seconds from the first tokens on.
        whole: seconds with the prompts.
        num_tokens: that came behind the first ones.
        answers: token ids.
    """

    decoding: float
    whole: float
    num_tokens: int
    answers: list[list[int]]


def timed_answers(llm: LLM, prompts: list[list[int]], tokens: int) -> Timed:
    """Answer prompts greedily, one at a time."""
    decoding, whole, num_tokens, answers = 0.0, 0.0, 0, []
    for ids in prompts:
        runs = []
        for _ in range(REPEATS + 2):  # the first one may compile, and the second captures what it saw before
            start = time.perf_counter()
            request = llm.engine.add(ids, SamplingParams(max_new_tokens=tokens))
            while not request.num_output:
                llm.engine.step()
            first, before = time.perf_counter(), request.num_output
            while request.finish_reason is None:
                llm.engine.step()
            end = time.perf_counter()
            runs.append((end - first, end - start, request.num_output - before))
        seconds, with_prompt, count = zip(*runs[2:], strict=True)
        decoding, whole, num_tokens = decoding + min(seconds), whole + min(with_prompt), num_tokens + count[0]
        answers.append(request.tokens[request.prompt_len :])
    return Timed(decoding, whole, num_tokens, answers)


def _measure_tau(llm: LLM, prompts: dict[str, list[list[int]]], tokens: int) -> dict[str, object]:
    """τ at temperatures 0 and 0.7; and for the greedy answers what the trainer predicts of the same tree."""
    start = time.perf_counter()
    heads: DraftHeads = llm.engine.drafter._guesses._heads  # type: ignore[attr-defined]
    answers: list[int] = []

    def ask(ids: list[list[int]]) -> list[Completion]:
        completions = llm.generate(ids, SamplingParams(max_new_tokens=tokens))
        answers.extend(token for completion in completions for token in completion.token_ids)
        return completions

    check = check_tau(
        ask,
        llm.hf_model,
        heads,
        llm.engine.drafter.choices,  # type: ignore[attr-defined]
        [(ids, name) for name, ids_of in prompts.items() for ids in ids_of],
    )
    columns = heads.columns_of(torch.tensor(answers, device=llm.hf_model.device), -1)
    greedy = {name: round(value, 3) for name, value in (check.by_category | {"all": check.measured}).items()}
    return {
        "nodes": 1 + len(llm.engine.drafter.choices),  # type: ignore[attr-defined]
        "tau_0.0": greedy,
        "tau_0.7": taus(llm, prompts, tokens, 0.7),
        "predicted": {
            "tau": round(check.predicted, 3),
            "measured": round(check.measured, 3),
            "difference": round(check.difference, 4),
            "all_positions": round(check.expected, 3),
            "top1": [round(head[0], 3) for head in check.accuracies],
            "top5": [round(sum(head[:5]), 3) for head in check.accuracies],
            "when_trained": None if heads.config.chances is None else round(1 + sum(heads.config.chances), 3),
        },
        "scored": round((columns >= 0).double().mean().item(), 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _gains(found: Timed, base: Timed) -> dict[str, object]:
    """What heads gain over plain decoding."""
    speed, plain = found.num_tokens / found.decoding, base.num_tokens / base.decoding
    return {
        "tok_s": round(speed, 1),
        "gain": round(speed / plain, 3),
        "gain_with_prompt": round(base.whole / found.whole, 3),
        "equal": found.answers == base.answers,
    }


def _facts(path: str | None) -> dict[str, object]:
    """The command, and what it runs on."""
    arguments = [a for a in sys.argv[1:] if a not in ("--json", path)]
    return {
        "command": " ".join(["python", "benchmarks/heads.py", *arguments]),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@click.command()
@click.argument("folders", nargs=-1, required=True)
@click.option("--model", default="smollm2-135m")
@click.option("--tokens", default=128)
@click.option("--tau/--no-tau", "with_tau", default=True, help="Whether τ is measured, on all prompts.")
@click.option("--at-once", default=70, help="Prompts that τ is measured on together.")
@click.option("--timed", default=2, help="Prompts of each category that are timed.")
@click.option("--sizes", default="8,16,32,64", help="Nodes of the trees that are timed.")
@click.option("--prompts", "source", default="builtin", help="`builtin`, or a file as for `specdec bench acceptance`.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Of each category; all by default.")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def main(
    folders: tuple[str, ...],
    model: str,
    tokens: int,
    with_tau: bool,
    at_once: int,
    timed: int,
    sizes: str,
    source: str,
    num_prompts: int | None,
    path: str | None,
) -> None:
    """Measure heads."""
    plain = LLM(model, "none", max_num_seqs=1, enable_prefix_caching=False)
    assert plain.tokenizer is not None
    prompts: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in load_prompts(source, most=num_prompts):
        prompts[prompt.category].append(prompt.encode(plain.tokenizer))
    some = [ids for ids_of in prompts.values() for ids in ids_of[:timed]]
    base = timed_answers(plain, some, tokens)
    rows = []
    for heads in folders:

        def opened(nodes: int, seqs: int, heads: str = heads, **engine_options: int) -> LLM:
            options = {"max_nodes": nodes}
            name = f"{json.loads((Path(heads) / 'config.json').read_text())['kind']}:{heads}"
            return LLM(
                plain.hf_model,
                name,
                tokenizer=plain.tokenizer,
                drafter_options=options,
                max_num_seqs=seqs,
                cost_table=None,
                enable_prefix_caching=False,
                **engine_options,
            )

        row: dict[str, object] = {"heads": Path(heads).name}
        if with_tau:
            # Captured steps take fewer nodes where they don't pay; prompts and full pools must take none either.
            longest = max(len(ids) for ids_of in prompts.values() for ids in ids_of)
            blocks = at_once * -(-(longest + tokens + 64) // 16)
            room = {"max_num_batched_tokens": 2 * 64 * at_once + longest, "num_blocks": blocks}  # half is for prompts
            row |= _measure_tau(opened(64, at_once, cuda_graphs=False, **room), prompts, tokens)
            click.echo(str(row))
        speeds = {}
        for nodes in map(int, sizes.split(",")) if timed else ():
            speeds[nodes] = _gains(timed_answers(opened(nodes, 1), some, tokens), base)
            click.echo(f"{nodes} nodes: {speeds[nodes]}")
        rows.append(row | {"speeds": speeds})
    result = {
        **_facts(path),
        "model": model,
        "tokens": tokens,
        "prompts": {name: len(ids_of) for name, ids_of in prompts.items()},
        "plain_tok_s": round(base.num_tokens / base.decoding, 1) if timed else None,
        "rows": rows,
    }
    click.echo(json.dumps(result))
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
