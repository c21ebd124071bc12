"""The group of the `specdec bench` commands."""

import click

from specdec.cli.bench.acceptance import acceptance
from specdec.cli.bench.kernels import kernels
from specdec.cli.bench.seeds import seeds
from specdec.cli.bench.serve import serve
from specdec.cli.bench.speed import latency, throughput


@click.group()
def bench() -> None:
    """Measure acceptance, speed and exactness, beside other engines."""


for _command in (acceptance, latency, throughput, serve, kernels, seeds):
    bench.add_command(_command)
