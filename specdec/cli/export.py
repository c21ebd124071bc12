"""`specdec export`: draft heads in the layouts that other engines read."""

import click


@click.command()
@click.option("--heads", required=True, type=click.Path(), help="The folder of Medusa heads.")
@click.option(
    "--format",
    "layout",
    required=True,
    type=click.Choice(["medusa-v1", "medusa-v2", "vllm"]),
    help="medusa-v1 and -v2 are read by TGI, medusa-v1 also by Medusa's own code, vllm by vLLM.",
)
@click.option("--out", required=True, type=click.Path(), help="The folder to make.")
@click.option(
    "--model",
    help="The heads' base: its head is written out where the heads share it, and TGI loads it by the name written.",
)
def export(heads: str, layout: str, out: str, model: str | None) -> None:
    """Write draft heads for other engines."""
    from specdec.drafters.export import export_heads
    from specdec.drafters.heads import load_heads
    from specdec.hub.load import load

    base = None if model is None else load(model, dtype="auto", device="cpu").model
    export_heads(load_heads(heads), out, layout, base)
    click.echo(f"written to {out}")
