"""Options that several `specdec bench` commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from specdec.cli.options import OutputFile
from specdec.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def prompt_options(command: F) -> F:
    """Add --prompts, --category and --num-prompts."""
    for option in (
        click.option("--num-prompts", type=click.IntRange(min=1), help="Prompts of each category.  [default: all]"),
        click.option("--category", "categories", multiple=True, help="Only these; may be repeated.  [default: all]"),
        click.option(
            "--prompts",
            default="builtin",
            help="builtin, or a file: JSONL of prompts or messages, Spec-Bench, MT-Bench, HumanEval, ShareGPT.",
        ),
    ):
        command = option(command)
    return command


def json_option(command: F) -> F:
    """Add --json."""
    return click.option("--json", "out", type=OutputFile(), help="Write the result to this file.")(command)


def numbers(name: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Read whole numbers with commas between them; none of an empty text.

    Raises:
        ConfigError: the text holds something else, or a number below `least`.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"{name} takes whole numbers of at least {least} with commas, such as 1,8, not {text!r}")
    return tuple(map(int, parts))
