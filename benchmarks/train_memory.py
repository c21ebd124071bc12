"""Peak memory of training heads at 8k tokens a step: each kind, shared projection, bf16 base with random weights.

    python benchmarks/train_memory.py --json benchmarks/results/train_memory_8b_h100.json

The base is a Llama of the given sizes, by default Llama-3-8B's. A peak is of all that torch held at once: base, heads,
gradients, AdamW's state and activations, over a few steps and one evaluation.
"""

import json
import random
import sys
import time
from typing import Literal

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec.training.config import TrainConfig
from specdec.training.data import Example
from specdec.training.hidden import new_heads
from specdec.training.memory import peak_bytes, reset_peak
from specdec.training.step import Stepper


def random_base(device: torch.device, hidden_size: int, num_layers: int, vocab_size: int) -> PreTrainedModel:
    """A Llama with random weights in bf16, with Llama-3-8B's proportions."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 128),
        num_key_value_heads=max(1, hidden_size // 512),
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_examples(num_tokens: int, length: int, vocab_size: int) -> list[Example]:
    """One batch of texts of random tokens, the first quarter of each being the prompt."""
    rng = random.Random(0)
    answer = (False,) * (length // 4) + (True,) * (length - length // 4)
    return [Example(tuple(rng.choices(range(vocab_size), k=length)), answer) for _ in range(num_tokens // length)]


def measure(
    model: PreTrainedModel,
    kind: Literal["medusa", "hydra"],
    num_heads: int,
    batch: list[Example],
    steps: int,
) -> dict[str, object]:
    """Take a few steps and one evaluation with new heads of a kind."""
    reset_peak(model.device)
    base_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    heads = new_heads(model, num_heads, 1, "shared", kind)
    num_tokens = sum(len(example.input_ids) for example in batch)
    stepper = Stepper(model, heads, TrainConfig(steps=steps, batch_tokens=num_tokens))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        stepper.step(stepper.prepare(batch), 1e-3)
        times.append(time.perf_counter() - start)
    stepper.evaluate(batch)
    return {
        "kind": kind,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "tokens_a_step": num_tokens,
        "base_gb": round(base_bytes / 1e9, 2),
        "peak_gb": round(peak_bytes(model.device) / 1e9, 2),
        "tokens_per_s": round(num_tokens / min(times)),
    }


@click.command()
@click.option("--hidden-size", default=4096, show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--vocab-size", default=128256, show_default=True)
@click.option("--heads", "num_heads", default=4, show_default=True)
@click.option("--batch-tokens", default=8192, show_default=True, help="Tokens a step.")
@click.option("--length", default=1024, show_default=True, help="Tokens of each text.")
@click.option("--steps", default=3, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
def main(
    hidden_size: int,
    layers: int,
    vocab_size: int,
    num_heads: int,
    batch_tokens: int,
    length: int,
    steps: int,
    device: str,
    path: str | None,
) -> None:
    """Measure the peak memory of training Medusa and Hydra heads."""
    place = torch.device(device)
    model = random_base(place, hidden_size, layers, vocab_size)
    batch = random_examples(batch_tokens, length, vocab_size)
    rows = []
    for kind in ("medusa", "hydra"):
        rows.append(measure(model, kind, num_heads, batch, steps))  # type: ignore[arg-type]
        click.echo(str(rows[-1]))
    if path:
        facts = {
            "command": " ".join(["python", "benchmarks/train_memory.py", *sys.argv[1:]]),
            "card": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(facts | {"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
