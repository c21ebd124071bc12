"""Where the examples of `specdec train` come from: a file, or the model that is to be drafted for."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specdec.hub.load import Loaded
    from specdec.llm import LLM
    from specdec.training.chat import Messages
    from specdec.training.clock import Clock
    from specdec.training.data import Example
    from specdec.training.prompts import Ask

AT_ONCE = {"cpu": 16, "cuda": 256}
"""Prompts that the model answers together, by device."""
PROMPT_TOKENS = 128
"""Most tokens of a prompt that the model writes; one that doesn't end by then is left out."""
PROMPTS_FILE, TASKS_FILE = "prompts.jsonl", "tasks.jsonl"
TEXTS_A_TASK = 0.25
"""Of the prompts that are tasks, those that are orders to write the texts for the others."""
PROMPTS_UNTIL, ANSWERS_UNTIL, TEXTS_UNTIL, TASKS_UNTIL = 0.16, 0.3, 0.37, 0.55
"""Shares of a limited time after which no more prompts, answers, texts for tasks and answers to tasks are written."""


def make_examples(
    loaded: "Loaded", options: Mapping[str, Any], max_len: int, clock: "Clock | None" = None
) -> "list[Example]":
    """Read examples, or let the model answer prompts and make them of that.

    Args:
        loaded: the base and its tokenizer.
        options: the command's data, prompts, self_distill, num_prompts, answer_tokens, temperatures, openings,
            tasks, seed, out.
        max_len: examples are cut here, in tokens.
        clock: of the whole command, if its time is limited.

    Raises:
        DataError: a file can't be read or written, or nothing usable was found.
        ConfigError: several processes would answer the same prompts.
        UnsupportedModel: the engine can't run the base.
    """
    from specdec.training.data import read_examples

    assert loaded.tokenizer is not None
    if options["prompts"] is None and not options["self_distill"]:
        return read_examples(options["data"], loaded.tokenizer, max_len, _say)
    return _own_answers(loaded, options, max_len, clock)


def check_answers(options: Mapping[str, Any]) -> None:
    """Check how the model is to answer, before hours go into what comes first.

    Args:
        options: the command's temperatures and answer_tokens.

    Raises:
        InvalidRequest: one is out of bounds.
    """
    from specdec.params import SamplingParams

    for temperature in options["temperatures"]:
        SamplingParams(max_new_tokens=options["answer_tokens"], temperature=temperature)


def _own_answers(loaded: "Loaded", options: Mapping[str, Any], max_len: int, clock: "Clock | None") -> "list[Example]":
    from accelerate import PartialState

    from specdec.errors import ConfigError
    from specdec.llm import LLM
    from specdec.training.prompts import without_known
    from specdec.training.writing import compose_orders

    if PartialState().num_processes > 1:
        raise ConfigError("one process must answer the prompts; run without `accelerate launch` first, then --resume")
    assert loaded.tokenizer is not None
    at_once = AT_ONCE[loaded.model.device.type]
    on_gpu = loaded.model.device.type == "cuda"
    longest = PROMPT_TOKENS + options["answer_tokens"]
    sizes = {"max_num_batched_tokens": 8192, "num_blocks": 2 * at_once * longest // 16}
    drafter = "none" if on_gpu else "ngram"  # so many sequences fill a GPU without drafts
    llm = LLM(
        loaded.model,
        drafter,
        tokenizer=loaded.tokenizer,
        max_num_seqs=at_once,
        enable_prefix_caching=False,
        **(sizes if on_gpu else {}),
    )
    num_tasks = round(options["tasks"] * options["num_prompts"]) if options["prompts"] == "self" else 0
    num_tasks = min(num_tasks, options["num_prompts"] - 1)  # one prompt at least is the model's own
    num_orders = round(TEXTS_A_TASK * num_tasks)

    def answered(prompts: "list[Messages]", share: float) -> "list[Example]":
        return _answered(llm, prompts, options, max_len, _until(share, clock, options)) if prompts else []

    prompts = _prompts(llm, options, options["num_prompts"] - num_tasks, at_once, _until(PROMPTS_UNTIL, clock, options))
    examples = answered(prompts, ANSWERS_UNTIL)
    texts = answered(without_known(compose_orders(num_orders, options["seed"]), _benchmark()), TEXTS_UNTIL)
    tasks = answered(_tasks(llm, texts, options, num_tasks - num_orders), TASKS_UNTIL)
    if not (found := [*examples, *texts, *tasks]):
        raise ConfigError("no prompt was answered in the time that --time-limit leaves for it; give more minutes")
    return found


def _answered(
    llm: "LLM", prompts: "list[Messages]", options: Mapping[str, Any], max_len: int, go_on: Callable[[], bool]
) -> "list[Example]":
    """Prompts with the model's own answers, which are kept in the run's folder."""
    from specdec.drafters.heads import base_fingerprint
    from specdec.training.distill import distill

    assert llm.tokenizer is not None
    _say(f"{len(prompts)} prompts, answered by the model itself")
    settings = {name: options[name] for name in ("temperatures", "answer_tokens", "seed")}
    with _timed("answers"):
        return distill(
            _ask(llm, options["answer_tokens"], options["temperatures"], options["seed"]),
            prompts,
            llm.tokenizer,
            options["out"] / "answers.jsonl",
            settings=settings,
            fingerprint=base_fingerprint(llm.hf_model),
            max_len=max_len,
            batch=AT_ONCE[llm.hf_model.device.type],
            report=_say,
            go_on=go_on,
        )


def _prompts(
    llm: "LLM", options: Mapping[str, Any], wanted: int, at_once: int, go_on: Callable[[], bool]
) -> "list[Messages]":
    """Those of a file, or the model's own, kept in the run's folder."""
    from specdec.training.openings import OPENINGS
    from specdec.training.prompts import read_prompts, self_prompts, without_known, write_prompts

    if options["prompts"] != "self":
        return read_prompts(options["prompts"] or options["data"])
    kept: Path = options["out"] / PROMPTS_FILE
    if kept.exists():
        return _kept(kept, wanted)
    assert llm.tokenizer is not None
    ask = _ask(llm, PROMPT_TOKENS, (1.0,), options["seed"])
    openings = OPENINGS if options["openings"] else ()
    with _timed("prompts"):
        found = self_prompts(
            ask, llm.tokenizer, wanted, openings=openings, batch=min(at_once, max(8, wanted)), go_on=go_on
        )
    found = without_known(found, _benchmark())
    write_prompts(kept, found)
    return found


def _tasks(llm: "LLM", examples: "list[Example]", options: Mapping[str, Any], wanted: int) -> "list[Messages]":
    """Tasks on the texts that the model has written to order, kept in the run's folder."""
    from specdec.training.prompts import without_known, write_prompts
    from specdec.training.tasks import compose_tasks

    kept: Path = options["out"] / TASKS_FILE
    if not wanted:
        return []
    if kept.exists():
        return _kept(kept, wanted)
    assert llm.tokenizer is not None
    answers = [list(compress(example.input_ids, example.answer)) for example in examples]
    texts = llm.tokenizer.batch_decode(answers, skip_special_tokens=True)
    found = without_known(compose_tasks(texts, wanted, options["seed"]), _benchmark())
    if len(found) < wanted:
        _say(f"{len(found)} tasks could be made of the texts, not {wanted}")
    if found:
        write_prompts(kept, found)
    return found


def _kept(path: Path, wanted: int) -> "list[Messages]":
    """Those that an earlier call has made, at most so many."""
    from specdec.training.prompts import read_prompts

    found = read_prompts(path)[:wanted]
    if len(found) < wanted:
        _say(f"{path} holds {len(found)} prompts, not {wanted}, and they are taken; remove it, and others are made")
    return found


def _benchmark() -> list[str]:
    """What the built-in benchmark asks: nothing is trained on that."""
    from specdec.bench.dataset import BUILTIN, load_prompts

    return [message["content"] for prompt in load_prompts(BUILTIN) for message in prompt.messages]


def _until(share: float, clock: "Clock | None", options: Mapping[str, Any]) -> Callable[[], bool]:
    """What says whether there is time for more; none for a run that has begun to train on what there is."""
    from specdec.training.checkpoint import has_checkpoint

    if clock is None:
        return lambda: True
    return (lambda: False) if has_checkpoint(options["out"]) else clock.runs_until(share)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    _say(f"{what}: {time.monotonic() - start:.0f} s")


def _ask(llm: "LLM", max_new_tokens: int, temperatures: Sequence[float], seed: int) -> "Ask":
    """Answer batches of prompts, each request with a seed of its own, the temperatures in turn."""
    from specdec.params import MAX_SEED, SamplingParams

    seeds = count(seed * 1_000_003 % (MAX_SEED // 2))

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=next(seeds), detokenize=False)
            for _, temperature in zip(prompts, cycle(temperatures), strict=False)
        ]
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    return ask


def _say(message: str) -> None:
    click.echo(message, err=True)
