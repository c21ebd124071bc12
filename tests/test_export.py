"""Heads written for other engines: the names that they read, the same logits when read back, refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from specdec.cli.main import main
from specdec.drafters.export import export_heads
from specdec.drafters.heads import HeadsConfig, base_fingerprint, load_heads, make_heads, save_heads
from specdec.drafters.medusa_heads import MedusaHeads
from specdec.errors import CheckpointError, ConfigError
from tests.conftest import tiny_llama
from tests.medusa import target_of

K = 2
PARTS = ("weight", "bias")


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float32)


def heads_of(base: LlamaForCausalLM, projection: Any = "own", num_layers: int = 1, **changes: Any) -> MedusaHeads:
    vocab_size, hidden_size = base.lm_head.weight.shape
    same: dict[str, Any] = {
        "num_heads": K,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "projection": projection,
        "base_fingerprint": base_fingerprint(base),
    }
    heads = make_heads(HeadsConfig(**(same | changes)))
    assert isinstance(heads, MedusaHeads)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    return heads.requires_grad_(False)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("layout", "projection", "num_layers"),
    [
        ("medusa-v1", "own", 1),
        ("medusa-v1", "own", 3),
        ("medusa-v1", "shared", 2),
        ("medusa-v2", "shared", 1),
        ("vllm", "own", 2),
        ("vllm", "shared", 1),
        ("vllm of 5", "own", 2),
        ("vllm of 5", "shared", 1),
    ],
)
def test_what_is_read_back_scores_the_same(
    tmp_path: Path, base: LlamaForCausalLM, layout: str, projection: str, num_layers: int
) -> None:
    layout, _, size = layout.partition(" of ")
    heads = heads_of(base, projection, num_layers, draft_vocab=int(size) if size else None)
    if heads.token_ids is not None:
        heads.token_ids.copy_(torch.tensor([2, 3, 50, 60, 96]))
    export_heads(heads, tmp_path / "out", layout, base)
    target = target_of(base)
    again = load_heads(tmp_path / "out", target)
    hidden, head = torch.randn(5, target.hidden_size), target.head_for(heads.token_ids)
    torch.testing.assert_close(again(hidden, head), heads(hidden, head))
    assert again.token_ids is heads.token_ids or torch.equal(again.token_ids, heads.token_ids)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_that_the_loaders_read(tmp_path: Path, base: LlamaForCausalLM) -> None:
    vocab_size, h = base.lm_head.weight.shape
    own, shared = heads_of(base, num_layers=2), heads_of(base, "shared")
    export_heads(own, tmp_path / "v1", "medusa-v1")
    shapes = {name: list(t.shape) for name, t in load_file(tmp_path / "v1" / "medusa_lm_head.safetensors").items()}
    blocks = {f"{k}.{i}.linear.{p}": [h, h][: 2 - (p == "bias")] for k in range(K) for i in (0, 1) for p in PARTS}
    assert shapes == blocks | {f"{k}.2.weight": [vocab_size, h] for k in range(K)}
    assert json.loads((tmp_path / "v1" / "config.json").read_text()) == {"medusa_num_heads": K, "medusa_num_layers": 2}
    export_heads(shared, tmp_path / "v2", "medusa-v2")
    assert len(load_file(tmp_path / "v2" / "medusa_lm_head.safetensors")) == 2 * K
    assert json.loads((tmp_path / "v2" / "config.json").read_text())["version"] == "2"
    export_heads(shared, tmp_path / "vllm", "vllm", base)
    shapes = {name: list(t.shape) for name, t in load_file(tmp_path / "vllm" / "model.safetensors").items()}
    blocks = {f"blocks.{k}.layers.0.{p}": [h, h][: 2 - (p == "bias")] for k in range(K) for p in PARTS}
    assert shapes == blocks | {"lm_heads.0.weight": [vocab_size, h]}
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config | {"torch_dtype": ""} == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": h,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": K,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "",
    }


def test_vllm_heads_without_biases_or_with_a_token_map(tmp_path: Path, base: LlamaForCausalLM) -> None:
    heads = heads_of(base)
    heads.blocks[0].bias.zero_()
    export_heads(heads, tmp_path / "out", "vllm")
    file, config = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    save_file({name: t for name, t in load_file(file).items() if not name.endswith("bias")}, file)
    with pytest.raises(CheckpointError, match="lacks 0.0.linear.bias"):
        load_heads(tmp_path / "out")
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"medusa_fc_bias": False}))
    again = load_heads(tmp_path / "out")
    assert torch.equal(again.blocks[0].weight, heads.blocks[0].weight)  # type: ignore[arg-type]
    save_file({f"medusa_heads.{name}": t for name, t in load_file(file).items()}, file)  # vLLM reads these names too
    assert torch.equal(load_heads(tmp_path / "out").blocks[0].weight, heads.blocks[0].weight)  # type: ignore[arg-type]
    config.write_text(json.dumps(raw | {"truncated_vocab_size": 5}))
    with pytest.raises(CheckpointError, match="token_map must be 5 different ids of 97 tokens"):
        load_heads(tmp_path / "out")


@pytest.mark.parametrize("rows", ["mapped", "all"])
def test_vllm_maps_tokens_in_any_order(tmp_path: Path, base: LlamaForCausalLM, rows: str) -> None:
    heads, ids = heads_of(base), [96, 3, 50, 8]
    export_heads(heads, tmp_path / "out", "vllm")
    file, config = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    tensors, raw = load_file(file), json.loads(config.read_text())
    if rows == "mapped":
        tensors |= {name: t[ids].contiguous() for name, t in tensors.items() if name.startswith("lm_heads")}
    save_file(tensors | {"token_map": torch.tensor(ids, dtype=torch.int32)}, file)
    config.write_text(json.dumps(raw | {"truncated_vocab_size": 4}))
    again = load_heads(tmp_path / "out")
    assert (again.config.vocab_size, again.config.draft_vocab) == (97, 4)
    assert again.token_ids.tolist() == sorted(ids)  # type: ignore[union-attr]
    want = heads.projection[:, sorted(ids)]  # type: ignore[index]
    assert torch.equal(again.projection, want)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "changes", "match"),
    [
        ([1, 2, 2], {"truncated_vocab_size": 3}, "3 different ids of 97"),
        ([1, 2, 97], {"truncated_vocab_size": 3}, "3 different ids of 97"),
        ([1, 2], {"truncated_vocab_size": 3}, "3 different ids of 97"),
        ([0.0, 1.0, 2.0], {"truncated_vocab_size": 3}, "3 different ids of 97"),
        ([0, 1, 2], {"truncated_vocab_size": 3, "vocab_size": 50}, "lm_heads.0.weight has 97 rows for 3 mapped"),
        ([0, 1, 2], {"truncated_vocab_size": "3"}, "truncated_vocab_size '3' of vocab_size 97"),
        ([0, 1, 2], {"truncated_vocab_size": 98}, "truncated_vocab_size 98 of vocab_size 97"),
    ],
    ids=str,
)
def test_maps_that_do_not_fit_are_refused(
    tmp_path: Path, base: LlamaForCausalLM, ids: list[Any], changes: dict[str, Any], match: str
) -> None:
    export_heads(heads_of(base), tmp_path / "out", "vllm")
    file, config = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    save_file(load_file(file) | {"token_map": torch.tensor(ids)}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=match):
        load_heads(tmp_path / "out")


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_vllm_has_a_map_of_a_draft_vocabulary(tmp_path: Path, base: LlamaForCausalLM, projection: str) -> None:
    heads, ids = heads_of(base, projection, draft_vocab=4), [3, 8, 9, 96]
    assert heads.token_ids is not None
    heads.token_ids.copy_(torch.tensor(ids))
    export_heads(heads, tmp_path / "out", "vllm", base)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["truncated_vocab_size"], raw["vocab_size"], tensors["token_map"].tolist()) == (4, 97, ids)
    want = base.lm_head.weight[ids] if heads.projection is None else heads.projection[0]
    assert torch.equal(tensors["lm_heads.0.weight"], want)


def test_what_a_layout_cannot_express_is_refused(tmp_path: Path, base: LlamaForCausalLM) -> None:
    hydra = make_heads(
        HeadsConfig(kind="hydra", num_heads=1, num_layers=0, hidden_size=4, vocab_size=5, projection="own")
    )
    biased = tiny_llama(dtype=torch.float32)
    biased.lm_head.bias = nn.Parameter(torch.ones(biased.lm_head.weight.shape[0]))
    for heads, layout, model, match in (
        (hydra, "medusa-v1", None, "can't express hydra heads"),
        (heads_of(base), "medusa-v2", None, "these heads have their own"),
        (heads_of(base, "shared", 2), "medusa-v2", None, "these heads have 2"),
        (heads_of(base, "shared"), "medusa-v1", None, "give the model"),
        (heads_of(base, "shared"), "vllm", None, "give the model"),
        (heads_of(base, "shared"), "vllm", biased, "base's head has one"),
        (heads_of(base, draft_vocab=5), "medusa-v1", None, "score 5 of 97 tokens; export to vllm"),
        (heads_of(base, "shared", draft_vocab=5), "medusa-v2", None, "no map of a draft vocabulary"),
        (heads_of(base), "medusa-v1", tiny_llama(1), "base_fingerprint"),
        (heads_of(base), "medusa-v1", tiny_llama(hidden_size=16), "hidden_size 32, the model has 16"),
        (heads_of(base), "medusa-v1", tiny_llama(vocab_size=98), "vocab_size 97, the model has 98"),
    ):
        with pytest.raises(CheckpointError, match=match):
            export_heads(heads, tmp_path / "out", layout, model)
    with pytest.raises(ConfigError, match="unknown layout 'eagle'; known: medusa-v1, medusa-v2, vllm"):
        export_heads(heads_of(base), tmp_path / "out", "eagle")
    assert not list(tmp_path.iterdir())


def test_nothing_half_written_and_nothing_overwritten(
    tmp_path: Path, base: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match="isn't an empty folder"):
        export_heads(heads_of(base), tmp_path / "mine", "medusa-v1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdec.hub.cache.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_heads(heads_of(base), tmp_path / "out", "medusa-v1")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_export_command(tmp_path: Path, base: LlamaForCausalLM) -> None:
    base.save_pretrained(tmp_path / "base")
    save_heads(heads_of(base, "shared"), tmp_path / "heads")
    args = ["export", "--heads", str(tmp_path / "heads"), "--format", "medusa-v1", "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(main, args)
    assert refused.exit_code == 2 and "give the model" in refused.output
    done = CliRunner().invoke(main, [*args, "--model", str(tmp_path / "base")])
    assert done.exit_code == 0, done.output
    assert f"written to {tmp_path / 'out'}" in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
