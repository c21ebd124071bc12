"""`specdec serve`: the OpenAI-compatible server."""

import gc
import sys
from typing import Any

import click

from specdec.cli.options import model_options
from specdec.errors import ConfigError

SWITCH_SECONDS = 0.0005
"""How long a Python thread keeps the interpreter while others wait: at the usual 5 ms each read and write of the event
loop would wait that long for the engine's thread."""


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 lets other machines in.")
@click.option("--port", default=8000, help="0 takes a free one.")
@click.option("--api-key", "api_keys", multiple=True, envvar="SPECDEC_API_KEY", help="Ask for this key; repeatable.")
@click.option("--served-model-name", "model_name", help="What clients call the model.")
@click.option("--max-num-seqs", default=16, help="Answers that run at once.")
@click.option("--max-queue", default=256, help="Answers that may wait beside them; more are refused with 429.")
@click.option("--max-model-len", type=int, help="Most tokens of prompt and answer; by default the model's limit.")
@click.option("--num-blocks", type=int, help="Blocks of the KV cache; by default what fits in 1 GiB.")
@click.option("--tenant-header", help="Header, set by a trusted proxy, that names the tenant; prefixes aren't shared.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Let this origin's pages read answers; repeatable.")
@click.option("--max-body-bytes", default=4 << 20, help="Longest body of a request.")
@click.option("--drain-seconds", default=30.0, help="How long running answers may go on after SIGTERM.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def serve(
    model: str,
    drafter: str,
    device: str,
    dtype: str,
    quantization: str | None,
    prepack: bool | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve a model over HTTP as OpenAI does, with a playground at /."""
    try:
        from specdec.server.app import make_app
        from specdec.server.config import ServerConfig
        from specdec.server.logs import set_up_logs
        from specdec.server.run import DrainingServer, check_address
    except ModuleNotFoundError as error:
        message = f"the server needs {error.name}; install it with: pip install fastapi uvicorn prometheus_client"
        raise ConfigError(message) from error
    from specdec.llm import LLM

    sizes = {name: options.pop(name) for name in ("max_num_seqs", "max_model_len", "num_blocks")}
    config = ServerConfig(**options)
    check_address(config)
    set_up_logs(log_level)
    llm = LLM(model, drafter, device=device, dtype=dtype, quantization=quantization, prepack=prepack, **sizes)
    give_turns()
    DrainingServer(make_app(llm, config), config).run()


def give_turns() -> None:
    """Let no thread keep the others waiting for long: neither the engine's nor one that collects garbage."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # no later collection walks through all that torch and transformers loaded
