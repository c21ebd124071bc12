"""`specdec generate`: answer prompts from the command line."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import cache_options, make_llm, make_params, model_options, report, sampling_options, typed

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.outputs import Completion
    from specdec.params import SamplingParams


@click.command()
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@model_options
@cache_options
@sampling_options
@click.option("--chat", "as_chat", is_flag=True, help="Wrap each prompt in the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@click.option("--stream", is_flag=True, help="Print the text as it comes, one prompt after the other.")
def generate(prompts: tuple[str, ...], as_chat: bool, as_json: bool, stream: bool, **options: Any) -> None:
    """Continue each PROMPT; - reads one from standard input."""
    if as_json and stream:
        raise click.UsageError("--json and --stream exclude each other")
    params = make_params(options)
    texts = [typed(sys.stdin.read) if prompt == "-" else prompt for prompt in prompts]
    llm = make_llm(options)
    if stream:
        for text in texts:
            _stream(llm, _encode(llm, text, as_chat), params)
        return
    start = time.perf_counter()
    completions = llm.generate([_encode(llm, text, as_chat) for text in texts], params)
    seconds = time.perf_counter() - start
    for text, completion in zip(texts, completions, strict=True):
        if as_json:
            click.echo(json.dumps(_as_dict(text, completion, seconds), ensure_ascii=False))
        else:
            click.echo(completion.text)
            click.echo(report(completion.stats, seconds), err=True)


def _encode(llm: "LLM", text: str, as_chat: bool) -> list[int] | str:
    return llm.encode_chat([{"role": "user", "content": text}]) if as_chat else text


def _stream(llm: "LLM", prompt: list[int] | str, params: "SamplingParams") -> None:
    for chunk in llm.stream(prompt, params):
        click.echo(chunk.text, nl=False)
    click.echo()


def _as_dict(prompt: str, completion: "Completion", seconds: float) -> dict[str, Any]:
    stats = completion.stats
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "proposers": completion.proposers,
        "stats": asdict(stats)
        | {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_by_depth": stats.acceptance_by_depth,
        },
        "batch_seconds": seconds,
    }
