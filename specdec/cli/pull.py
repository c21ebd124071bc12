"""`specdec pull`: fetch a model that needs no hub."""

import click

from specdec.cli.options import DEFAULT_MODEL


@click.command()
@click.argument("name", default=DEFAULT_MODEL)
def pull(name: str) -> None:
    """Fetch model NAME and convert it into an ordinary Hugging Face folder; prints the folder."""
    from specdec.hub.fetch import pull as fetch

    click.echo(fetch(name))
