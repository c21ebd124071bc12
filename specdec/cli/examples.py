"""Where the examples of `specdec train` come from: a file, or the model that is to be drafted for."""

from collections.abc import Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specdec.hub.load import Loaded
    from specdec.llm import LLM
    from specdec.training.chat import Messages
    from specdec.training.data import Example
    from specdec.training.prompts import Ask

AT_ONCE = {"cpu": 16, "cuda": 256}
"""Prompts that the model answers together, by device."""
PROMPT_TOKENS = 128
"""Most tokens of a prompt that the model writes; one that doesn't end by then is left out."""


def make_examples(loaded: "Loaded", options: Mapping[str, Any], max_len: int) -> "list[Example]":
    """Read examples, or let the model answer prompts and make them of that.

    Args:
        loaded: the base and its tokenizer.
        options: the command's data, prompts, self_distill, num_prompts, answer_tokens, temperatures, seed, out.
        max_len: examples are cut here, in tokens.

    Raises:
        DataError: a file can't be read or written, or nothing usable was found.
        ConfigError: several processes would answer the same prompts.
        UnsupportedModel: the engine can't run the base.
    """
    from specdec.training.data import read_examples

    assert loaded.tokenizer is not None
    if options["prompts"] is None and not options["self_distill"]:
        return read_examples(options["data"], loaded.tokenizer, max_len, _say)
    return _own_answers(loaded, options, max_len)


def _own_answers(loaded: "Loaded", options: Mapping[str, Any], max_len: int) -> "list[Example]":
    from accelerate import PartialState

    from specdec.drafters.heads import base_fingerprint
    from specdec.errors import ConfigError
    from specdec.llm import LLM
    from specdec.training.distill import distill

    if PartialState().num_processes > 1:
        raise ConfigError("one process must answer the prompts; run without `accelerate launch` first, then --resume")
    assert loaded.tokenizer is not None
    at_once = AT_ONCE[loaded.model.device.type]
    on_gpu = loaded.model.device.type == "cuda"
    sizes = {"max_num_batched_tokens": 8192, "num_blocks": at_once * (PROMPT_TOKENS + options["answer_tokens"]) // 16}
    drafter = "none" if on_gpu else "ngram"  # so many sequences fill a GPU without drafts
    llm = LLM(loaded.model, drafter, tokenizer=loaded.tokenizer, max_num_seqs=at_once, **(sizes if on_gpu else {}))
    prompts = _prompts(llm, options, at_once)
    click.echo(f"{len(prompts)} prompts, answered by the model itself", err=True)
    settings = {name: options[name] for name in ("temperatures", "answer_tokens", "seed")}
    return distill(
        _ask(llm, options["answer_tokens"], options["temperatures"], options["seed"]),
        prompts,
        loaded.tokenizer,
        options["out"] / "answers.jsonl",
        settings=settings,
        fingerprint=base_fingerprint(loaded.model),
        max_len=max_len,
        batch=at_once,
        report=_say,
    )


def _prompts(llm: "LLM", options: Mapping[str, Any], at_once: int) -> "list[Messages]":
    """Those of a file, or the model's own, kept in the run's folder."""
    from specdec.training.prompts import read_prompts, self_prompts, write_prompts

    if options["prompts"] != "self":
        return read_prompts(options["prompts"] or options["data"])
    kept: Path = options["out"] / "prompts.jsonl"
    if kept.exists():
        return read_prompts(kept)
    assert llm.tokenizer is not None
    ask, wanted = _ask(llm, PROMPT_TOKENS, (1.0,), options["seed"]), options["num_prompts"]
    found = self_prompts(ask, llm.tokenizer, wanted, batch=min(at_once, max(8, wanted)))
    write_prompts(kept, found)
    return found


def _ask(llm: "LLM", max_new_tokens: int, temperatures: Sequence[float], seed: int) -> "Ask":
    """Answer batches of prompts, each request with a seed of its own, the temperatures in turn."""
    from specdec.params import SamplingParams

    seeds = count(seed * 1_000_003)

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=next(seeds), detokenize=False)
            for _, temperature in zip(prompts, cycle(temperatures), strict=False)
        ]
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    return ask


def _say(message: str) -> None:
    click.echo(message, err=True)
