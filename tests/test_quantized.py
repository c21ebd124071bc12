"""Quantized weights: transformers quantizes, the decoder calls what it made, and speculation stays invisible."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.build import cost_key
from specdec.cli.main import main
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.heads import base_fingerprint
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter
from specdec.engine.capturable import why_no_graph
from specdec.errors import ConfigError, UnsupportedModel
from specdec.hub import quantize
from specdec.hub.load import load
from specdec.hub.quantize import QUANTIZATIONS, quantization_config
from specdec.hub.quiet import quiet
from specdec.kernels.ops import triton_ops
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel
from specdec.models.load import make_target
from specdec.models.support import quantized_by
from specdec.verifier.rules import CoupledRule
from tests.conftest import VOCAB, tiny_llama
from tests.engines import drain, make_engine, outputs, run
from tests.kernels import ON_GPU
from tests.medusa import random_medusa

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [3], list(range(20, 60))]
PARAMS = [SamplingParams(max_new_tokens=20, seed=i, temperature=t) for i, t in enumerate([0.0, 1.2, 0.0])]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
KINDS = [
    *(pytest.param(name, marks=needs_torchao) for name in ("int8", "int8_dynamic", "fp8")),
    pytest.param("nf4", marks=needs_bitsandbytes),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(dtype=torch.float64, hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(path)
    return path


def quantized(path: Path, kind: str) -> PreTrainedModel:
    dtype = torch.float32
    return load(path, dtype=dtype, device=CPU, quantization=quantization_config(kind, dtype, CPU)).model


class Single(nn.Module):
    """A quantized projection in a model whose other parts compute in float64.

    Where activations are rounded to int8, last bits that depend on the batch would become more than that.
    """

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self._call = [projection]  # not a submodule: it stays as it is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call[0](x.float()).to(x.dtype)


def in_double(path: Path, kind: str) -> PreTrainedModel:
    model = quantized(path, kind)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if hasattr(module, "weight"):
                    setattr(part, name, Single(module))
    nn.Module.double(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_speculative_is_quantized_plain(kind: str, saved: Path) -> None:
    model = in_double(saved, kind)
    target = make_target(model)
    assert isinstance(target, Decoder) and target.quantized_by in ("torchao", "bitsandbytes")
    layer = target.weights.layers[0]
    assert isinstance(layer.qkv, tuple) and isinstance(layer.down, tuple)
    want = outputs(run(make_engine(target, max_num_seqs=1), PROMPTS, PARAMS))
    drafters: list[Drafter] = [
        NGramDrafter(),
        DraftModelDrafter(target, VOCAB, (2, 2)),
        DraftModelDrafter(target.first_layers(1), VOCAB, (2, 2), own_pages=False),
        random_medusa(model),
    ]
    for drafter in drafters:
        requests = run(make_engine(target, drafter), PROMPTS, PARAMS)
        assert outputs(requests) == want, drafter.name
        assert sum(r.stats.num_draft_tokens for r in requests), drafter.name


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_computes_what_the_quantized_model_does(kind: str, saved: Path) -> None:
    """To within a part of what quantizing changes: transformers' norms round to fp32, ours don't."""
    model, ids = in_double(saved, kind), torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        want = model(ids).logits[0, -1]
        plain = load(saved, dtype=torch.float64, device=CPU).model(ids).logits[0, -1]
    engine = make_engine(model)
    request = engine.add(PROMPTS[2], SamplingParams(max_new_tokens=1), keep_logits=True)
    drain(engine)
    change = (plain - want).norm()
    assert change > 1e-3 * want.norm(), "nothing was quantized"
    assert (request.logits[0][0] - want).norm() < 0.3 * change


@needs_torchao
def test_a_quantized_model_is_its_base_to_heads_but_not_to_cost_tables(saved: Path) -> None:
    model, base = quantized(saved, "int8"), load(saved, dtype=torch.float64, device=CPU).model
    assert base_fingerprint(model) == base_fingerprint(base)
    assert (quantized_by(model), quantized_by(base)) == ("torchao", None)
    assert cost_key(model).dtype == "float32-torchao-Int8WeightOnlyConfig" and cost_key(base).dtype == "float64"
    assert cost_key(quantized(saved, "int8_dynamic")).dtype.startswith("float32-torchao-Int8Dynamic")


@needs_torchao
def test_a_quantized_model_in_memory_is_taken_as_it_is(saved: Path) -> None:
    model = quantized(saved, "int8")
    assert LLM(model).hf_model is model
    with pytest.raises(ConfigError, match="a model in memory can't be quantized"):
        LLM(model, quantization="int8")


@needs_torchao
def test_the_self_check_of_its_own_forward_passes(saved: Path) -> None:
    assert HFModel(quantized(saved, "int8")).vocab_size == VOCAB


@needs_torchao
def test_a_quantized_head_is_left_to_the_models_own_forward(saved: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = quantized(saved, "int8")
    quantize_(model.lm_head, Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedModel, match="lm_head is a Linear of Int8Tensor"):
        Decoder(model)
    assert isinstance(make_target(model), HFModel)


@needs_torchao
def test_a_quantized_checkpoint_loads_without_being_told(saved: Path, tmp_path: Path) -> None:
    with quiet():
        quantized(saved, "int8_dynamic").save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), "none", max_model_len=128)
    assert isinstance(llm.engine.model, Decoder) and llm.engine.model.quantized_by == "torchao"
    want = outputs(run(make_engine(quantized(saved, "int8_dynamic")), PROMPTS, PARAMS))
    assert [c.token_ids for c in llm.generate(PROMPTS, PARAMS)] == want


def packed(weight: torch.Tensor, method: str, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight [out, in] as GPTQ or AWQ checkpoints store it, in 4 bits, and what it is worth then: [out, in]."""
    wide, out = weight.t().reshape(-1, group, len(weight)), len(weight)
    scales = (wide.abs().amax(1, keepdim=True) / 7).half()
    codes = (wide / scales.float()).round() + 8
    worth = ((codes - 8) * scales.float()).flatten(0, 1)
    codes = codes.flatten(0, 1).int()  # [in, out]
    if method == "gptq":  # eight rows a word, and zero points less one
        words, zeros = _words(codes.t(), range(8)).t(), torch.full((len(wide), out), 7, dtype=torch.int32)
        tensors = {"qweight": words, "qzeros": _words(zeros, range(8))}
        tensors["g_idx"] = (torch.arange(len(codes)) // group).int()
    else:  # eight columns a word
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        zeros = torch.full((len(wide), out), 8, dtype=torch.int32)
        tensors = {"qweight": _words(codes, order), "qzeros": _words(zeros, order)}
    tensors["scales"] = scales.squeeze(1)
    return {name: x.contiguous() for name, x in tensors.items()}, worth.t().contiguous()


def _words(codes: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
    """Fours of bits [n, 8 m] as words [n, m], the lowest bits first."""
    eights = codes.reshape(len(codes), -1, 8)
    parts = [eights[..., place] << 4 * i for i, place in enumerate(order)]
    return torch.stack(parts).sum(0, dtype=torch.int32)


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_checkpoints_of_four_bits(method: str, tmp_path: Path) -> None:
    """gptqmodel 7.7 needs a NumPy that Triton's interpreter doesn't know: so this is for an environment of its own."""
    dense = tiny_llama(dtype=torch.float32, hidden_size=64, intermediate_size=128, head_dim=16)
    tensors: dict[str, torch.Tensor] = {}
    worth = dict(dense.state_dict())
    for name, weight in dense.state_dict().items():
        if name.endswith("_proj.weight"):
            parts, worth[name] = packed(weight, method)
            tensors |= {f"{name.removesuffix('weight')}{part}": x for part, x in parts.items()}
        else:
            tensors[name] = weight.contiguous()
    dense.load_state_dict(worth)
    kind = {"desc_act": False, "sym": True, "checkpoint_format": "gptq"} if method == "gptq" else {"version": "gemm"}
    dense.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True} | kind
    dense.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    del dense.config.quantization_config
    model = load(tmp_path, dtype=torch.float32, device=CPU).model
    target = make_target(model)
    assert isinstance(target, Decoder) and target.quantized_by == method
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        want, got = (x(ids).logits[0, -1].float() for x in (dense, model))  # its kernels may compute in half precision
    torch.testing.assert_close(got, want, atol=0.05 * float(want.abs().max()), rtol=0)
    plain = outputs(run(make_engine(target, max_num_seqs=1), PROMPTS, PARAMS))
    assert outputs(run(make_engine(target, NGramDrafter()), PROMPTS, PARAMS)) == plain


@needs_torchao
@pytest.mark.skipif(ON_GPU, reason="the interpreter's ops over weights on a CPU")
def test_captured_steps_are_declined_by_name(saved: Path) -> None:
    dtype = torch.float32
    model = load(saved, dtype=dtype, device=CPU, quantization=quantization_config("int8", dtype, CPU)).model
    decoder = Decoder(model, triton_ops())
    why = why_no_graph(decoder, NGramDrafter(), CoupledRule())
    assert why == "quantized weights run by torchao's own products"
    params = SamplingParams(max_new_tokens=2)
    want = outputs(run(make_engine(model), [[3, 4]], [params]))
    assert outputs(run(make_engine(decoder), [[3, 4]], [params])) == want


def test_what_cannot_be_done_is_refused_by_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; choose from int8, "):
        LLM(str(saved), quantization="int3")
    monkeypatch.setattr(quantize, "is_installed", lambda package: package == "torchao")
    with pytest.raises(ConfigError, match="quantization 'nf4' needs bitsandbytes: pip install bitsandbytes"):
        LLM(str(saved), quantization="nf4")
    with pytest.raises(ConfigError, match="'int4' needs an NVIDIA GPU and bfloat16; others are int8, int8_dynamic"):
        LLM(str(saved), quantization="int4", device="cpu")


@needs_torchao
def test_weights_that_cannot_be_quantized_as_asked_are_named(saved: Path) -> None:
    with pytest.raises(UnsupportedModel, match="can't be quantized so in torch.float64 on cpu"):
        load(saved, dtype=torch.float64, device=CPU, quantization=quantization_config("int8", torch.float64, CPU))


@needs_torchao
def test_from_the_command_line(folder: Path) -> None:
    options = ["--model", str(folder), "--device", "cpu", "--quantization", "int8_dynamic", "--max-new-tokens", "5"]
    result = CliRunner().invoke(main, ["generate", "abc", *options])
    assert result.exit_code == 0 and "5 tokens" in result.output
    result = CliRunner().invoke(main, ["generate", "abc", "--model", str(folder), "--quantization", "int3"])
    assert result.exit_code == 2 and "is unknown; choose from" in result.output


def test_info_says_what_is_there() -> None:
    facts = CliRunner().invoke(main, ["info"]).output
    line = next(line for line in facts.splitlines() if line.startswith("quantization"))
    assert all(name in line for name in QUANTIZATIONS) and "may depend on its batch" in line
    assert ("pip install torchao" in line) == (importlib.util.find_spec("torchao") is None)
    assert "quantized weights" in facts
