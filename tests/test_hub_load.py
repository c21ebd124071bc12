"""Opening a model never runs what it carries, and says what is wrong with it."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

from specdec import LLM
from specdec.errors import CheckpointError, ModelNotFound, SpecdecError, UnsupportedModel
from specdec.hub.load import Loaded, describe, load
from specdec.hub.quiet import quiet


def tiny(**settings: Any) -> LlamaForCausalLM:
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with quiet():
        tiny(dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def opened(model: Any, **options: Any) -> Loaded:
    return load(model, **({"dtype": "auto", "device": "cpu"} | options))


def edit_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def test_a_folder_opens_ready_to_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = opened(folder)
    assert loaded.name == "tiny" and loaded.tokenizer is None and loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert opened(str(folder), dtype=torch.float64).model.dtype == torch.float64
    assert capfd.readouterr() == ("", "")
    assert describe(folder) == f"a llama model in {folder}"


def test_a_model_in_memory_keeps_its_gradients() -> None:
    model = tiny().train()
    loaded = opened(model)
    assert loaded.model is model and not model.training and model.lm_head.weight.requires_grad
    assert loaded.name == "LlamaForCausalLM" and opened(model, dtype=torch.float64).model.dtype == torch.float64
    with pytest.raises(UnsupportedModel, match="Linear"):
        opened(torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedModel, match="LlamaModel .* no language modelling head"):
        LLM(opened(model.model).model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_in_memory_says_what_its_folder_does(folder: Path, dtype: torch.dtype) -> None:
    """Casting rotary frequencies, even to the dtype that the weights have, would change the model's answers."""
    in_memory = opened(opened(folder, dtype=torch.float32).model, dtype=dtype).model
    again = opened(opened(folder, dtype=dtype).model, dtype=dtype).model
    wanted = opened(folder, dtype=dtype).model
    ids = torch.arange(64)[None] % wanted.config.vocab_size
    for model in (in_memory, again):
        for (name, buffer), (_, want) in zip(model.named_buffers(), wanted.named_buffers(), strict=True):
            assert buffer.dtype == want.dtype and torch.equal(buffer, want), name
        assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_tokenizers(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert opened(folder, tokenizer=tokenizer).tokenizer is tokenizer
    tokenizer.save_pretrained(tmp_path / "words")
    given = opened(folder, tokenizer=tmp_path / "words").tokenizer
    assert given is not None and given("a")["input_ids"] == [0]
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        opened(folder, tokenizer=folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer of .* can't be read"):
        opened(folder)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "~/nothing", "no spaces", Path("nothing")])
def test_no_such_folder(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match="no folder.*smollm2-135m"):
        opened(name)
    assert describe(name).startswith("can't be used: there is no folder")


@pytest.mark.parametrize("name", ["google/gemma-3-270m", "HuggingFaceTB/SmolLM2-135M", "someone/smollm2-135m", "gpt2"])
def test_an_id_of_the_hub_may_be_near_a_known_name(name: str) -> None:
    assert describe(name).startswith("a hub id")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "gemma3"])
def test_a_name_near_a_known_one_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"no model '{name}'; did you mean '(smollm2-135m|gemma3-270m)'"):
        opened(name)


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """A file that only code from a checkpoint would make."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("way", ["alone", "by index", "by config", "as adapter"])
def test_pickles_are_never_opened(folder: Path, trace: Path, way: str) -> None:
    name = "adapter_model.bin" if way == "by config" else "pytorch_model.bin"
    (folder / name).write_bytes(pickle.dumps(Payload(trace)))
    (folder / "model.safetensors").unlink()
    if way == "by index":
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif way == "by config":
        edit_config(folder, transformers_weights=name)
    elif way == "as adapter":
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(CheckpointError, match="adapter" if way == "as adapter" else name):
        opened(folder)
    assert describe(folder).startswith("can't be used")


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_is_never_imported(folder: Path, trace: Path, model_type: str) -> None:
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Model", "evil.Model"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(folder, model_type=model_type, auto_map=auto_map)
    with pytest.raises(CheckpointError if model_type == "llama" else UnsupportedModel):
        opened(folder)
    (folder / "tokenizer_config.json").unlink()
    if model_type == "llama":
        assert isinstance(opened(folder).model, LlamaForCausalLM)
        edit_config(folder, architectures=["EvilForCausalLM"])
    with pytest.raises(UnsupportedModel, match="code"):
        opened(folder)


def test_kernels_that_a_config_names_are_not_fetched(folder: Path) -> None:
    edit_config(folder, _attn_implementation="evil/kernel")
    assert opened(folder).model.config._attn_implementation == "sdpa"


def tear(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])


def lose_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (tear, CheckpointError, r"torn: model.safetensors"),
        (lose_shard, CheckpointError, "lacks model-00002"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), CheckpointError, "no index"),
        (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "holds no model.safetensors"),
        (lambda f: (f / "config.json").unlink(), CheckpointError, "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), CheckpointError, "can't be read"),
        (lambda f: edit_config(f, hidden_size="wide"), CheckpointError, "expected int"),
        (lambda f: edit_config(f, hidden_act="nope"), CheckpointError, "nope"),
        (change_weights(lambda w: w.pop("lm_head.weight")), CheckpointError, "lm_head.weight"),
        (change_weights(lambda w: w.update({"lm_head.weight": torch.zeros(3, 16)})), CheckpointError, "lm_head.weight"),
        (lambda f: edit_config(f, architectures=["LlamaModel"]), UnsupportedModel, "no such head"),
        (lambda f: T5Config().save_pretrained(f), UnsupportedModel, "decoder-only"),
        (
            lambda f: edit_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
            UnsupportedModel,
            "optimum",
        ),
    ],
)
def test_damaged_folders(folder: Path, damage: Callable[[Path], None], error: type[SpecdecError], match: str) -> None:
    damage(folder)
    with pytest.raises(error, match=match):
        opened(folder)


def test_a_missing_quantizer_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_package(*args: object, **kwargs: object) -> None:
        raise ImportError("Loading a GPTQ quantized model requires optimum")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", needs_package)
    with pytest.raises(UnsupportedModel, match="optimum"):
        opened(folder)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    with quiet():
        BertModel(BertConfig(**size, num_attention_heads=1)).save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedModel, match="BertModel"):
        opened(tmp_path / "bert")


def test_a_weights_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        opened(folder / "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub, unreachable, with one model in its cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return repo / "snapshots" / ("0" * 40)


def test_hub_ids(hub: Path, folder: Path) -> None:
    shutil.copytree(folder, hub)
    assert opened("owner/tiny").name == "owner/tiny"
    assert describe("owner/tiny").startswith("a hub id")
    (hub / "model.safetensors").rename(hub / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no model.safetensors"):
        opened("owner/tiny")
    with pytest.raises(ModelNotFound, match="owner/other.*connect.*smollm2-135m"):
        opened("owner/other")
