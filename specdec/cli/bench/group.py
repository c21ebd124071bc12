"""The group of the `specdec bench` commands."""

import click

from specdec.cli.bench.acceptance import acceptance
from specdec.cli.bench.serve import serve


@click.group()
def bench() -> None:
    """Measure acceptance, speed and exactness, beside other engines."""


for _command in (acceptance, serve):
    bench.add_command(_command)
