"""Models that the decoder doesn't know, run by their own forward, against the same models by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, UnsupportedModel
from specdec.models.decoder import Decoder
from specdec.models.hf import HFModel, max_positions
from specdec.models.interface import window_code
from specdec.models.load import make_target
from tests.conftest import VOCAB, tiny_llama
from tests.engines import make_engine, outputs, run
from tests.families import packed_logits as run_chunks
from tests.scripted import OracleDrafter, RandomDrafter

TOKENS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ONE_KIND = TOKENS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DENSE = ONE_KIND | {"intermediate_size": 48}
GROUPED = DENSE | {"num_key_value_heads": 2}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10}
SPARSE_QWEN = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
WINDOW = 12  # longer than the self-check's prompts

REQUIRED = {
    "gpt2": lambda: hf.GPT2Config(**GPT2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**DENSE, use_parallel_residual=True),
    "olmo2": lambda: hf.Olmo2Config(**GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(**GROUPED, sliding_window=WINDOW),
    "cohere": lambda: hf.CohereConfig(**GROUPED, logit_scale=0.3, use_qk_norm=True),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=WINDOW),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(  # its window is in the mask alone
        **GROUPED, **SPARSE_QWEN, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1
    ),
}
MORE = {
    "gpt2 by layer": lambda: hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "stablelm": lambda: hf.StableLmConfig(**GROUPED),
    "opt": lambda: hf.OPTConfig(**ONE_KIND | {"pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=16),
    "phi": lambda: hf.PhiConfig(**GROUPED, partial_rotary_factor=0.5),
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "granite": lambda: hf.GraniteConfig(**GROUPED, logits_scaling=4.0, attention_multiplier=0.3),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **DENSE,
        **EXPERTS,
        **LATENT,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "bert decoder": lambda: hf.BertConfig(**DENSE, is_decoder=True),
}
REFUSED = {
    "bloom": (lambda: hf.BloomConfig(**TOKENS, hidden_size=32, n_layer=1, n_head=2), r"\(BloomAttention\) doesn't go"),
    "falcon": (lambda: hf.FalconConfig(**ONE_KIND), r"\(FalconAttention\) doesn't go"),
    "mpt": (lambda: hf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=2), r"\(MptAttention\) doesn't go"),
    "mamba": (lambda: hf.MambaConfig(**TOKENS, hidden_size=32, num_hidden_layers=1, state_size=4), "recurrent state"),
    "lfm2": (lambda: hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "layers of type 'conv'"),
    "llama4": (
        lambda: hf.Llama4TextConfig(**GROUPED, head_dim=8, num_local_experts=2),
        "layers of type 'chunked_attention'",
    ),
    "gpt_oss": (lambda: hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4), "asks for attention sinks"),
    "doge": (lambda: hf.DogeConfig(**GROUPED), "DogeAttention gets a mask of the model's own making"),
    "diffllama": (lambda: hf.DiffLlamaConfig(**GROUPED), "DiffLlamaAttention runs more than once a forward"),
}


def tiny(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model whose every parameter does something."""
    with torch.random.fork_rng():
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # embeddings are small, or a tied head repeats the token it was given
                torch.nn.init.normal_(parameter, std=0.3 if "emb" in name or "wte" in name else 0.6)
            else:  # a norm's weight or a bias; large biases would drown the tokens
                weight = name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(weight), std=0.3 if weight else 0.05)
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # the grouped products know no float64
    return model.eval()


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
