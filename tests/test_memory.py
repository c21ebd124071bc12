"""The memory of the KV cache: what is asked for, what is refused, and how many requests it holds."""

import pytest
import torch

from specdec.cache.pages import KVLayout
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.hybrid import HybridDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.engine.config import EngineConfig, resolve_limits
from specdec.engine.memory import parse_bytes, show_bytes
from specdec.errors import ConfigError
from specdec.models.decoder import Decoder
from specdec.params import SamplingParams
from tests.conftest import VOCAB, tiny_llama
from tests.engines import Optimist, make_engine
from tests.kernels import DEVICE, ON_GPU

LAYOUT = KVLayout(2, 2, 8, torch.float64)
"""512 bytes a token: 2 layers, keys and values, 2 heads of 8 numbers."""


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [(4096, 4096), ("4096", 4096), ("2GiB", 2 << 30), ("1.5 mib", 3 << 19), ("500MB", 500 * 10**6), ("1kb", 1000)],
)
def test_sizes(given: int | str, num_bytes: int) -> None:
    assert parse_bytes(given) == num_bytes
    config = EngineConfig(kv_cache_memory=given)
    layout = KVLayout(1, 1, 1, torch.float16)
    blocks = num_bytes // (4 * 16)
    assert resolve_limits(config, [layout], 10**12).num_blocks == blocks


@pytest.mark.parametrize("bad", [0, -1, "2GB!", "GiB", "", True, "0GiB", "1e9"])
def test_absurd_sizes(bad: object) -> None:
    with pytest.raises(ConfigError, match='bytes or a size such as "500MB"'):
        EngineConfig(kv_cache_memory=bad)  # type: ignore[arg-type]


def test_one_option_sets_the_size() -> None:
    with pytest.raises(ConfigError, match="num_blocks and kv_cache_memory each set the size"):
        EngineConfig(num_blocks=3, kv_cache_memory="1GiB")
    for share in (0, 1.1, True, "0.9"):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            EngineConfig(gpu_memory_utilization=share)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model is on the CPU; give kv_cache_memory"):
        resolve_limits(EngineConfig(gpu_memory_utilization=0.5), [LAYOUT], 100)


def test_where_nothing_fits_the_message_says_what_would() -> None:
    assert LAYOUT.bytes_per_token == 512
    assert resolve_limits(EngineConfig(kv_cache_memory=3 * 16 * 512), [LAYOUT], 100).max_model_len == 48
    with pytest.raises(ConfigError) as told:
        resolve_limits(EngineConfig(kv_cache_memory=3 * 16 * 512, max_model_len=100), [LAYOUT], 100)
    for part in (
        "holds 48 tokens",
        "at least 7 blocks (56.00 KiB)",
        'kv_cache_dtype="int8"',
        "max_model_len of at most 48",
    ):
        assert part in str(told.value)
    with pytest.raises(ConfigError, match="holds 0 tokens.*or a smaller model"):
        resolve_limits(EngineConfig(kv_cache_memory=100, kv_cache_dtype="fp8"), [LAYOUT.stored_as("fp8")], 100)
    assert [show_bytes(n) for n in (1023, 2048, 3 << 19, 5 << 30)] == ["1023 bytes", "2.00 KiB", "1.50 MiB", "5.00 GiB"]


def test_a_cache_that_cannot_be_allocated_is_refused_by_name() -> None:
    for size in ({"num_blocks": 1 << 50}, {"num_blocks": None, "kv_cache_memory": 1 << 60}):
        with pytest.raises(ConfigError, match=r"can't be allocated: .* GiB; give a smaller num_blocks"):
            make_engine(tiny_llama(), **size)


def test_a_draft_models_layers_count() -> None:
    target, draft = Decoder(tiny_llama()), Decoder(tiny_llama(seed=1, num_hidden_layers=1))
    both = HybridDrafter(NGramDrafter(), DraftModelDrafter(draft, VOCAB))
    early = DraftModelDrafter(target.first_layers(1), VOCAB, own_pages=False)
    memory = {"kv_cache_memory": 12 * 16 * 4 * 256, "num_blocks": None, "max_model_len": 64}
    blocks = [make_engine(target, drafter, **memory).limits.num_blocks for drafter in (None, early, both)]
    assert blocks == [16, 16, 12]  # three layers of 256 bytes a token, or four


def admitted(kv_cache_dtype: str) -> int:
    """Requests that run at once in the same memory, heads of 128 values, bf16 where not quantized."""
    model = tiny_llama(head_dim=128, num_hidden_layers=1, num_key_value_heads=1, dtype=torch.bfloat16)
    engine = make_engine(
        model,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=100 * 16 * 512,
        num_blocks=None,
        max_model_len=32,
        max_num_seqs=1000,
        max_nodes=1,
        max_num_batched_tokens=5000,
    )
    engine.scheduler.lengths = Optimist()  # as many as fit now
    requests = [engine.add([7] * 10, SamplingParams(max_new_tokens=4)) for _ in range(500)]
    engine.step()
    return sum(r.num_output == 1 for r in requests)


def test_requests_that_fit_in_the_same_memory() -> None:
    native = admitted("auto")
    assert native == 100
    assert admitted("int8") >= 1.9 * native and admitted("fp8") >= 1.9 * native and admitted("int4") >= 3.4 * native


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.gpu
def test_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)

    def left(share: float) -> int:
        limits = resolve_limits(EngineConfig(gpu_memory_utilization=share), [LAYOUT], 100, device)
        return limits.num_blocks * 16 * LAYOUT.bytes_per_token

    assert 0 < left(1.0) <= torch.cuda.mem_get_info()[1]  # others hold some of it, who knows how much
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 20, 100 << 20))
    assert left(0.5) == 10 << 20
    with pytest.raises(ConfigError, match="40.00 MiB are taken before there is any cache"):
        left(0.4)
