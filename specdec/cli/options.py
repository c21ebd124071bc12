"""Options that several commands share, and the objects that they describe."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from specdec.errors import InvalidRequest

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.outputs import SpeculationStats
    from specdec.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
_LLM_OPTIONS = (
    *(
        "device",
        "dtype",
        "quantization",
        "prepack",
        "kv_cache_dtype",
        "kv_group_size",
        "kv_cache_memory",
        "gpu_memory_utilization",
    ),
    *("max_model_len", "max_num_seqs"),
)
F = TypeVar("F", bound=Callable[..., Any])


def quantization_option(command: F) -> F:
    """Add --quantization, as in `LLM`."""
    return click.option("--quantization", help="Of the weights: int8, int8_dynamic, int4, fp8 or nf4.")(command)


def prepack_option(command: F) -> F:
    """Add --prepack/--no-prepack, as in `EngineConfig`."""
    text = (
        "Multiply by copies of the weights in the order in which products read them, on an x86 CPU or a Hopper GPU.  "
        "[default: where memory allows]"
    )
    return click.option("--prepack/--no-prepack", default=None, help=text)(command)


def model_options(command: F) -> F:
    """Add --model, --drafter, --device, --dtype, --quantization and --prepack."""
    for option in (
        prepack_option,
        quantization_option,
        click.option("--dtype", default="auto", help="auto is float32 on a CPU, bfloat16 on a GPU."),
        click.option("--device", default="auto", help="auto takes a GPU where there is one."),
        click.option(
            "--drafter",
            default="auto",
            help="none, ngram, shipped, medusa:PATH, hydra:PATH, recurrent:PATH, draft_model:PATH, early_exit, a heads "
            "folder, or two as ngram+shipped; auto takes n-grams and then the heads shipped for the model, if any.",
        ),
        click.option("--model", default=DEFAULT_MODEL, help="A folder, a hub id, or a name that `specdec pull` knows."),
    ):
        command = option(command)
    return command


def cache_options(command: F) -> F:
    """Add the options of `EngineConfig` that say how much the KV cache holds."""
    for option in (
        click.option("--gpu-memory-utilization", type=float, help="Share of a GPU's memory for weights and KV cache."),
        click.option("--kv-cache-memory", help="Bytes of the KV cache, e.g. 2GiB."),
        cache_format_options,
    ):
        command = option(command)
    return command


def cache_format_options(command: F) -> F:
    """Add the options of `EngineConfig` that say how keys and values are stored."""
    kinds = click.Choice(["auto", "fp8", "fp8_e4m3", "int8", "int4"])
    for option in (
        click.option("--kv-group-size", type=int, help="Values that share a scale in int8 and int4."),
        click.option("--kv-cache-dtype", type=kinds, default="auto", help="How keys and values are stored."),
    ):
        command = option(command)
    return command


def deterministic_option(command: F) -> F:
    """Add --deterministic/--no-deterministic, as in `EngineConfig`."""
    text = "On a GPU a token's bits don't depend on its batch; or the library's products."
    return click.option("--deterministic/--no-deterministic", default=True, show_default=True, help=text)(command)


def sampling_options(command: F) -> F:
    """Add the options that make a `SamplingParams`."""
    for option in (
        click.option("--stop", multiple=True, help="End the text before this string; may be repeated."),
        click.option("--seed", type=int, help="The same seed gives the same tokens."),
        click.option("--min-p", type=float, default=0.0, help="Drop tokens less likely than this × the likeliest."),
        click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0 keeps all."),
        click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this probability."),
        click.option("--temperature", type=float, default=0.0, help="0 is greedy."),
        click.option("--max-new-tokens", type=int, default=256, help="Most tokens to generate."),
    ):
        command = option(command)
    return command


def make_params(options: dict[str, Any]) -> "SamplingParams":
    """Take the sampling options out of a command's arguments and check them."""
    from specdec.params import SamplingParams

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    return SamplingParams(**{name: options.pop(name) for name in names})


def make_llm(options: dict[str, Any]) -> "LLM":
    """Load the model and the drafter that the options name."""
    from specdec.llm import LLM

    return LLM(
        options["model"], options["drafter"], **{name: options[name] for name in _LLM_OPTIONS if name in options}
    )


def typed(read: Callable[[], str]) -> str:
    """Return what comes from standard input.

    Raises:
        InvalidRequest: it is no text.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input isn't text in {error.encoding}: {error.reason}; give UTF-8") from error


class OutputFile(click.Path):
    """A file that is to be written at the end: whether that can be is found out before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: its folder isn't there, or nothing can be written there.
        """
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} doesn't exist; make it first", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"nothing can be written to the folder {str(path.parent)!r}; give another one", param, ctx)
        return path


def given_command() -> str:
    """Return the running command as it was given, such as "specdec train medusa --out=heads"; a shell takes it back."""
    context = click.get_current_context()
    words = ["specdec", *context.command_path.split()[1:]]
    arguments: list[str] = []
    for param in context.command.params:
        if param.name and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            value = context.params[param.name]
            values = value if isinstance(value, tuple) else (value,)
            if isinstance(param, click.Argument):
                arguments += map(str, values)
            elif isinstance(value, bool):
                words.append((param.opts if value else param.secondary_opts)[-1])
            else:
                words += [f"{param.opts[-1]}={one}" for one in values]
    return shlex.join([*words, *(["--"] if any(word.startswith("-") for word in arguments) else []), *arguments])


def report(stats: "SpeculationStats", seconds: float) -> str:
    """Return one line about how an answer was made."""
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth)
    return (
        f"{stats.num_output_tokens} tokens in {seconds:.2f} s, {stats.num_output_tokens / seconds:.1f} tok/s, "
        f"{stats.num_forwards} forwards, τ {stats.mean_acceptance_length:.2f}"
        + (f", acceptance by depth {depths}" if depths else "")
    )
