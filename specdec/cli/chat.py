"""`specdec chat`: talk with an instruct model in the terminal."""

import time
from typing import Any

import click

from specdec.cli.options import cache_options, make_llm, make_params, model_options, report, sampling_options, typed


@click.command()
@model_options
@cache_options
@sampling_options
@click.option("--system", help="A system message to start with.")
def chat(system: str | None, **options: Any) -> None:
    """Talk with the model; an empty line or Ctrl-D ends the conversation."""
    params = make_params(options)
    llm = make_llm(options)
    start_messages = [{"role": "system", "content": system}] if system else []
    llm.encode_chat([*start_messages, {"role": "user", "content": "hello"}])  # a model without a template fails now
    messages = start_messages
    while text := _ask():
        messages.append({"role": "user", "content": text})
        start = time.perf_counter()
        request = llm.engine.add(llm.encode_chat(messages), params)
        for chunk in llm.follow(request):
            click.echo(chunk.text, nl=False)
        click.echo()
        click.echo(click.style(report(request.stats, time.perf_counter() - start), dim=True), err=True)
        messages.append({"role": "assistant", "content": request.text})


def _ask() -> str:
    """Read a line; empty at the end of the input."""
    try:
        return typed(lambda: input(click.style("> ", bold=True))).strip()
    except EOFError:
        return ""
