"""The same engine on a GPU: float64 tokens are those of the CPU, bf16 tokens don't depend on how they were made."""

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import Drafter
from specdec.errors import ConfigError
from specdec.kernels.formats import FORMATS
from specdec.kernels.gpu.hopper import HopperKernel
from specdec.kernels.gpu.native import NATIVE, NATIVE_NARROW
from specdec.kernels.gpu.pair import PAIR
from specdec.models.decoder import Decoder
from tests.conftest import VOCAB, tiny_llama
from tests.engines import make_engine, outputs, run
from tests.hydra import random_hydra, random_recurrent
from tests.medusa import random_medusa
from tests.scripted import RandomDrafter

pytestmark = pytest.mark.gpu
SIXTEEN_NODES = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1)]
SIXTEEN_NODES += [(0, 1, 0), (1, 0, 0), (2, 0, 0)]  # and the root
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [3], [11, 12, 13] * 9, list(range(20, 60))]


def asks() -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=16, seed=i, temperature=0.0 if i % 2 else 1.2) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ["none", "ngram", "random", "medusa", "hydra", "recurrent", "draft_model"])
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    want = outputs(run(make_engine(tiny_llama()), PROMPTS, asks()))
    model = tiny_llama().to("cuda")
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "ngram": NGramDrafter(),
        "random": RandomDrafter(),
        "medusa": random_medusa(model),
        "hydra": random_hydra(model),
        "recurrent": random_recurrent(model),
        "draft_model": DraftModelDrafter(Decoder(model), VOCAB, (2, 3, 3)),
    }
    assert outputs(run(make_engine(model, drafters[name]), PROMPTS, asks())) == want


def test_a_gpu_is_the_default_and_bf16_its_dtype(folder) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(folder)
    assert (llm.engine.model.device.type, llm.engine.model.dtype) == ("cuda", torch.bfloat16)
    assert len(llm.generate("hello", SamplingParams(max_new_tokens=8))[0].token_ids) == 8


@pytest.mark.parametrize("pages", ["auto", *FORMATS])
@pytest.mark.parametrize("name", ["none", "ngram", "random", "medusa", "hydra", "recurrent"])
def test_bf16_tokens_depend_on_neither_drafter_nor_batch_nor_capture(name: str, pages: str) -> None:
    model = tiny_llama(dtype=torch.bfloat16, head_dim=32).to("cuda")
    alone = [
        outputs(run(make_engine(model, kv_cache_dtype=pages), [p], [a]))[0]
        for p, a in zip(PROMPTS, asks(), strict=True)
    ]
    for cuda_graphs in (True, False):
        drafters: dict[str, Drafter | None] = {
            "none": None,
            "ngram": NGramDrafter(),
            "random": RandomDrafter(),
            "medusa": random_medusa(model),
            "hydra": random_hydra(model),
            "recurrent": random_recurrent(model),
        }
        engine = make_engine(model, drafters[name], cuda_graphs=cuda_graphs, kv_cache_dtype=pages)
        assert (engine.graphs is not None) == (cuda_graphs and name != "random")
        assert outputs(run(engine, PROMPTS, asks())) == alone


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["none", "ngram", "medusa", "recurrent"])
def test_contexts_that_are_copied_early_change_no_token(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of several tiles, which captured steps read before the kernel before ends."""
    heads = {"head_dim": dim, "num_attention_heads": 8, "num_key_value_heads": 1}
    model = tiny_llama(dtype=torch.bfloat16, **heads).to("cuda")
    prompts = [[(7 * i + i * i // 9 + j) % VOCAB for i in range(n)] for j, n in enumerate((131, 190, 64, 230))]
    taken = set()
    for kind, way in {"wide": NATIVE, "narrow": NATIVE_NARROW}.items():
        attend = way.attend
        monkeypatch.setattr(way, "attend", lambda *args, kind=kind, attend=attend: (taken.add(kind), attend(*args)))
    alone = [outputs(run(make_engine(model), [p], [a]))[0] for p, a in zip(prompts, asks(), strict=True)]
    assert taken == {"narrow"}
    for cuda_graphs in (True, False):
        drafters: dict[str, Drafter | None] = {
            "none": None,
            "ngram": NGramDrafter(),
            "medusa": random_medusa(model),
            "recurrent": random_recurrent(model),
        }
        engine = make_engine(model, drafters[name], cuda_graphs=cuda_graphs)
        assert outputs(run(engine, prompts, asks())) == alone
    assert name not in ("medusa", "recurrent") or "wide" in taken, "trees have more rows"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["ngram", "paths", "medusa"])
def test_tiles_of_nodes_that_share_keys_change_no_token(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, captured and eager, of chains and of trees whose nodes fill two tiles or four; contexts of both splits."""
    heads = {"head_dim": dim, "num_attention_heads": 16, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    model = tiny_llama(dtype=torch.bfloat16, **heads).to("cuda")
    room = {"max_model_len": 4096, "num_blocks": 512}
    prompts = [[(i % 11) * (j + 3) % VOCAB for i in range(n)] for j, n in enumerate((131, 2100, 64, 3200))]
    alone = [outputs(run(make_engine(model, **room), [p], [a]))[0] for p, a in zip(prompts, asks(), strict=True)]
    attend, taken = PAIR.attend, set()

    def seen(q, pages, state, work, *args) -> None:  # type: ignore[no-untyped-def]
        taken.add((work.early, work.chains))
        attend(q, pages, state, work, *args)

    monkeypatch.setattr(PAIR, "attend", seen)
    monkeypatch.setattr(PAIR, "takes", lambda *batch: batch[2].pairs and HopperKernel.takes(PAIR, *batch))
    for cuda_graphs in (True, False):
        drafters: dict[str, Drafter] = {
            "ngram": NGramDrafter(num_speculative_tokens=15, max_paths=1),
            "paths": NGramDrafter(num_speculative_tokens=31),
            "medusa": random_medusa(model, choices=SIXTEEN_NODES),
        }
        engine = make_engine(model, drafters[name], cuda_graphs=cuda_graphs, **room)
        assert outputs(run(engine, prompts, asks())) == alone
    assert {early for early, _ in taken} >= ({True, False} if name == "medusa" else {True})


@pytest.mark.parametrize("deterministic", [True, False])
def test_slabs_change_no_token_and_follow_training(deterministic: bool) -> None:
    """Of a model whose rows are long enough; the drop-in takes them if told."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("weights are prepacked on Hopper GPUs")
    sizes = {"hidden_size": 2048, "intermediate_size": 2304, "head_dim": 64, "num_attention_heads": 32}
    models = [tiny_llama(seed, torch.bfloat16, initializer_range=0.05, **sizes).to("cuda") for seed in (0, 1)]
    params = SamplingParams(max_new_tokens=24)
    plain, packed = (
        LLM(models[0], "ngram", prepack=how, deterministic=deterministic, num_blocks=64) for how in (False, True)
    )
    decoder = packed.engine.model
    assert isinstance(decoder, Decoder) and decoder.prepacked and decoder.weights.layers[0].qkv.dim() == 3  # type: ignore[union-attr]
    assert LLM(models[0], num_blocks=64).engine.model.prepacked, "by default"  # type: ignore[attr-defined]
    for model in (None, models[1]):
        if model is not None:
            models[0].load_state_dict(model.state_dict())
            decoder.refresh()
            for llm in (plain, packed):
                llm.engine.reset_prefix_cache()
        answers = [[a.token_ids for a in llm.generate(PROMPTS, params)] for llm in (plain, packed)]
        assert answers[0] == answers[1] or not deterministic
    with pytest.raises(ConfigError, match="no matrix that gains by it on cuda.*2,048 inputs.*leave prepack out"):
        LLM(tiny_llama(dtype=torch.bfloat16).to("cuda"), prepack=True)
    with pytest.raises(ConfigError, match="float32 can't be prepacked on cuda.*Hopper GPUs: leave prepack out"):
        LLM(tiny_llama(dtype=torch.float32).to("cuda"), prepack=True)
