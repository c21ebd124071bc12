"""The `specdec` command. Commands import what they need when they run, so that `--help` is quick."""

import click

from specdec import __version__
from specdec.cli.bench.group import bench
from specdec.cli.chat import chat
from specdec.cli.demo import demo
from specdec.cli.export import export
from specdec.cli.generate import generate
from specdec.cli.info import info
from specdec.cli.pull import pull
from specdec.cli.serve import serve
from specdec.cli.train import train
from specdec.cli.tree import tree
from specdec.cli.tune import tune
from specdec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InvalidRequest,
    ModelNotFound,
    SpecdecError,
    UnsupportedModel,
)
from specdec.hub.quiet import hush

_BAD_INPUT = (InvalidRequest, ConfigError, DataError, ModelNotFound, UnsupportedModel, CheckpointError)


class _BadInput(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Turns our own errors into one line and an exit code: 2 for bad input, 1 otherwise."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise (_BadInput if isinstance(error, _BAD_INPUT) else click.ClickException)(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="specdec")
def main() -> None:
    """Generate several tokens per forward pass without changing what the model says."""
    hush()


for _command in (generate, chat, serve, pull, info, tune, train, tree, export, demo, bench):
    main.add_command(_command)
