"""Fixtures: tiny random models in float64, engines over them, and the real default model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub
if not os.path.exists("/dev/nvidiactl"):  # torch can't be asked: it imports Triton, which reads this then
    os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.letters import letters

VOCAB = 97
OLD_TRANSFORMERS = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="transformers 5.17 differs here from 5.24, which we follow: it ignores a bad word whose other tokens are "
    "the whole prefix, for one",
)
torch.set_num_threads(1)  # tiny products are faster so, and threads that wait for each other starve on a busy machine


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, open only modules that have such tests: the others may import what a GPU machine lacks."""
    if config.getoption("markexpr") != "gpu" or not collection_path.is_file():
        return None
    return "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object) -> LlamaForCausalLM:
    """A random Llama of three layers whose greedy answers neither loop at once nor end."""
    config: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
        "initializer_range": 0.6,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(config | overrides))).to(dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.eval()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test's random inputs are its own, not those that the tests before it in this process left to draw."""
    torch.manual_seed(int(os.environ.get("SPECDEC_TEST_SEED", "0")))


@pytest.fixture(autouse=True)
def no_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the times of captured steps would decide how many nodes the next ones have."""
    monkeypatch.setattr("specdec.engine.graphs.Mark.seconds_since", lambda mark, earlier: None)


@pytest.fixture
def no_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads draft in their own dtype on CPUs too, as they do where torch has no engine for int8."""
    monkeypatch.setattr("specdec.drafters.int8.ENGINES", ())


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of single characters, as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=96, dtype=torch.float32, max_position_embeddings=1024).save_pretrained(path)
    letters().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    from specdec.hub import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    from specdec.hub import pull

    return pull("gemma3-270m")
