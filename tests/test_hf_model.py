"""Models that the decoder doesn't know, run by their own forward, against the same models by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, UnsupportedModel
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel, max_positions
from specdec.models.interface import window_code
from specdec.models.load import make_target
from tests.conftest import VOCAB, tiny_llama
from tests.engines import make_engine, outputs, run
from tests.families import packed_logits as run_chunks
from tests.own_forward import GPT2, GROUPED, MORE, REFUSED, REQUIRED, tiny
from tests.scripted import OracleDrafter, RandomDrafter


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """What happens inside leaves the model as it was: its attention, its modules, its answers."""

    def state() -> tuple[object, ...]:
        return model.config._attn_implementation, [sorted(vars(m)) for m in model.modules()]

    ids = torch.arange(12)[None]
    before, logits = state(), model(ids).logits
    yield
    assert state() == before
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=0)


@pytest.fixture(scope="module", params=REQUIRED)
def required(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(REQUIRED[request.param]())


def check_logits(model: PreTrainedModel) -> None:
    ids = torch.arange(50) * 7 % VOCAB
    with torch.inference_mode(), unchanged(model):
        want = model(ids[None]).logits[0]
        packed = HFModel(model)
        assert packed.vocab_size == want.shape[-1] and want.std() > 0.01
        for chunks in ([50], [1] * 50, [17, 1, 31, 1]):
            got = run_chunks(packed, ids, chunks)
            # eager attention rounds probabilities to fp32 in a float64 model, hence the tolerance
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(model(ids[None]).logits[0], want, atol=0, rtol=0)  # in between


def test_logits_equal_transformers(required: PreTrainedModel) -> None:
    check_logits(required)


@pytest.mark.parametrize("name", MORE)
def test_logits_of_more_families_equal_transformers(name: str) -> None:
    check_logits(tiny(MORE[name]()))


def test_speculation_is_invisible_and_equal_to_generate(required: PreTrainedModel) -> None:
    """A batch of four in chunks, drafted by trees that are partly right and by random ones."""
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7], [3], list(range(20, 50)), [90, 4, 90, 4, 90]]
    greedy = SamplingParams(max_new_tokens=20, seed=0)
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = required.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        want.append(out[0, len(prompt) :].tolist())
    assert min(len(set(tokens)) for tokens in want) > 2, "the answers are too dull to show anything"
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    target = HFModel(required)
    with unchanged(required):
        for drafter in (None, OracleDrafter(answers, "ragged"), RandomDrafter()):
            engine = make_engine(target, drafter, max_model_len=128, max_nodes=12, max_num_batched_tokens=32)
            requests = run(engine, prompts, [greedy] * 4)
            assert outputs(requests) == want
            if isinstance(drafter, OracleDrafter):
                assert engine.num_steps < 20, "nothing was accepted"


def test_a_draft_may_reach_behind_the_last_position(required: PreTrainedModel) -> None:
    """A table of positions has no row for such a node, which is never emitted."""
    prompt = [7 * i % VOCAB for i in range(120)]
    target, params = HFModel(required), SamplingParams(max_new_tokens=100)
    want = run(make_engine(target, max_model_len=128), [prompt], [params])[0].tokens
    assert len(want) == 128
    for drafter in (RandomDrafter(), OracleDrafter({tuple(prompt): want[120:] * 9})):
        assert run(make_engine(target, drafter, max_model_len=128), [prompt], [params])[0].tokens == want


def test_sampled_speculation_is_invisible(required: PreTrainedModel) -> None:
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=i) for i in range(3)]
    prompts = [[1, 2, 3], [70] * 9, [8]]
    target = HFModel(required)
    want = [
        outputs(run(make_engine(target, max_model_len=128), [p], [s]))[0] for p, s in zip(prompts, params, strict=True)
    ]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    engine = make_engine(target, OracleDrafter(answers, "ragged"), max_model_len=128, max_nodes=8)
    assert outputs(run(engine, prompts, params)) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_dtypes_pass_the_self_check(name: str, dtype: torch.dtype) -> None:
    packed = HFModel(tiny(REQUIRED[name](), dtype))
    assert packed.dtype == packed.kv_layout.dtype == dtype


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    model = tiny(make(), torch.float32)
    with unchanged(model), pytest.raises(UnsupportedModel, match=f"{type(model).__name__}.* can't be run: .*{reason}"):
        HFModel(model)


def test_encoder_decoders_and_headless_models_are_refused() -> None:
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1))
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration .* it is an encoder-decoder"):
        HFModel(t5.eval())
    with pytest.raises(UnsupportedModel, match="GPT2Model .* no language modelling head"):
        HFModel(hf.GPT2Model(hf.GPT2Config(**GPT2)).eval())


def test_a_model_that_mixes_rows_outside_attention_is_refused() -> None:
    """What no name gives away, the self-check finds: here an MLP that looks at the row before."""
    model = tiny(REQUIRED["gpt2"]())
    mlp = model.transformer.h[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(UnsupportedModel, match="its logits differ from its own forward's .* in torch.float64"):
        HFModel(model)


def test_a_window_is_read_off_the_mask_however_far_it_reaches() -> None:
    from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
    from transformers.masking_utils import sliding_window_causal_mask_function as sliding

    def code(mask_function: object, local_size: int | None = None) -> torch.Tensor:
        config = hf.LlamaConfig(max_position_embeddings=5000)
        sizes = {"q_length": 3, "kv_length": 3, "local_size": local_size}
        return window_code(mask_function=mask_function, config=config, device="cpu", **sizes)

    assert code(causal_mask_function).unique().tolist() == [0]
    assert code(sliding(4096), 4096).unique().tolist() == [4096]
    assert code(sliding(8192), 8192).unique().tolist() == [8192]  # beyond the positions: as good as none
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        code(chunked_causal_mask_function(1024, torch.zeros(1, dtype=torch.int64)), 1024)


def test_a_window_that_the_mask_contradicts_is_refused() -> None:
    model = tiny(REQUIRED["starcoder2"]())
    model.model.config.sliding_window = None  # no window in the mask …
    attention = model.model.layers[0].self_attn
    attention.config = hf.Starcoder2Config(**GROUPED, sliding_window=4, attn_implementation="eager")  # … but here
    with pytest.raises(UnsupportedModel, match="asks for a window of 4, its mask for none"):
        HFModel(model)


def test_layers_of_different_shapes_are_refused() -> None:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups = 4
    attention.k_proj, attention.v_proj = (torch.nn.Linear(32, 8, dtype=torch.float64) for _ in range(2))
    with pytest.raises(UnsupportedModel, match="layer 1 has 1 key heads of 8 and 8, layer 0 has 2"):
        HFModel(model)


def test_training_is_refused_at_load_and_later() -> None:
    model = tiny(REQUIRED["gpt2"]())
    packed = HFModel(model)
    with unchanged(model):
        model.train()
        with pytest.raises(UnsupportedModel, match="it is in training mode; call model.eval"):
            HFModel(model)
        with pytest.raises(UnsupportedModel, match="GPT2Attention asks for dropout 0.1"):
            run_chunks(packed, torch.arange(4), [4])
        model.eval()


def test_the_position_table_limits_the_context() -> None:
    model = tiny(REQUIRED["gpt2"]())
    with pytest.raises(ConfigError, match="max_model_len 129 is beyond the model's 128 positions"):
        LLM(model, max_model_len=129)
    done = LLM(model, "none").generate([[1] * 120], SamplingParams(max_new_tokens=50))[0]
    assert len(done.token_ids) == 8 and done.finish_reason == "length"


def test_longrope_stays_where_its_angles_do_not_depend_on_the_batch() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope["original_max_position_embeddings"] = 32
    model = tiny(hf.Phi3Config(**GROUPED, rope_parameters=rope, original_max_position_embeddings=32))
    assert max_positions(model.config) == HFModel(model).max_len == 32


def test_the_decoder_runs_what_it_knows_and_the_models_own_forward_the_rest() -> None:
    assert isinstance(make_target(tiny_llama()), Decoder)
    assert isinstance(make_target(tiny_llama(hidden_act="quick_gelu")), HFModel)
    assert isinstance(make_target(tiny(REQUIRED["gpt2"]())), HFModel)
    broken = tiny_llama(hidden_act="quick_gelu").train()
    with pytest.raises(UnsupportedModel, match="'quick_gelu' is not supported; .*; by its own forward: .* training"):
        make_target(broken)


def test_llm_takes_any_of_them() -> None:
    model = tiny(REQUIRED["olmo2"](), torch.float32)
    params = SamplingParams(max_new_tokens=16)
    want = LLM(model, "none").generate([[1, 2, 3, 1, 2, 3]], params)[0].token_ids
    assert LLM(model, "ngram").generate([[1, 2, 3, 1, 2, 3]], params)[0].token_ids == want
