"""`model.generate`, unaccelerated and accelerated, on the real default model: same tokens, and how much faster.

    python benchmarks/dropin_cpu.py --json benchmarks/results/dropin_cpu.json

The baseline is the same model's own `generate`, greedy, in the same run, prompt by prompt.
"""

import json
import sys
import time

import click
import torch
import transformers

import specdec
from specdec.cli.demo_prompts import PROMPTS
from specdec.hub.load import load

COPYING = ("code", "rewriting", "extraction")


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="As for `specdec generate`.")
@click.option("--drafter", default="ngram", show_default=True, help="As for `specdec generate`.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Most tokens an answer.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
def main(model: str, drafter: str, max_new_tokens: int, path: str | None) -> None:
    """Time each prompt both ways."""
    loaded = load(model, dtype=torch.float32, device="cpu")
    assert loaded.tokenizer is not None
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def timed(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        out = loaded.model.generate(**inputs, **options)
        return out, time.perf_counter() - start

    rows = []
    for name, prompt in PROMPTS.items():
        messages = [{"role": "user", "content": prompt}]
        inputs = loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        want, hf_seconds = timed(inputs)
        with specdec.accelerate(loaded.model, drafter, tokenizer=loaded.tokenizer):
            got, seconds = timed(inputs)
        ratio = hf_seconds / seconds
        rows.append({"prompt": name, "identical": torch.equal(got, want), "speedup": round(ratio, 2)})
        click.echo(f"{name:<11} identical {torch.equal(got, want)}, {ratio:.2f}×{' (copies)' * (name in COPYING)}")
    if path:
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        command = " ".join(["python benchmarks/dropin_cpu.py", *(a for a in sys.argv[1:] if a not in ("--json", path))])
        result = {"command": command, "model": model, "drafter": drafter, **facts}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result | {"transformers": transformers.__version__, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
