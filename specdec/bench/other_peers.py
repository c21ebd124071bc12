"""Other engines as peers, imported only where they are asked for. Each runs with its own defaults.

Written against vLLM 0.26, economize 0.3 and FlashSpec 0.3.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.bench.systems import Answer, Room
from specdec.errors import ConfigError
from specdec.hub.load import Loaded
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from specdec.bench.results import Split

LOOKUP_TOKENS = 5
GPU_MEMORY = 0.5
"""Share of the GPU's memory that vLLM may take: the target is loaded beside it, to judge margins by."""


class _Peer:
    """What the peers share.

    Args:
        loaded: the target.
        path: none is used.
        room: sizes.
    """

    exact = captures = False
    drafter: str | None = None

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        if path is not None:
            raise ConfigError(f"this peer takes no path, not {path!r}")
        self._loaded, self._room = loaded, room
        config: Any = loaded.model.generation_config
        eos = config.eos_token_id
        self._eos = list(eos) if isinstance(eos, list) else [eos] if eos is not None else []

    def split(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> "Split | None":
        """Return None."""
        return None

    def _refuse_sampling(self, params: Sequence[SamplingParams]) -> None:
        if not params[0].greedy:
            raise ConfigError("this adapter runs its peer greedily only; measure with temperature 0")


class VLLM(_Peer):
    """vLLM's offline engine on the same folder or hub id."""

    speculation: dict[str, Any] | None = None

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        import vllm

        super().__init__(loaded, path, room)
        self._vllm: Any = vllm
        self._llm: Any = vllm.LLM(
            model=str(loaded.model.config.name_or_path),
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            max_model_len=room.max_len,
            max_num_seqs=room.num_seqs,
            gpu_memory_utilization=GPU_MEMORY,
            enable_prefix_caching=False,
            speculative_config=self.speculation,
        )

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts together."""
        sampling = [
            self._vllm.SamplingParams(max_tokens=p.max_new_tokens, temperature=p.temperature, seed=p.seed)
            for p in params
        ]
        tokens = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(tokens, sampling, use_tqdm=False)
        return [Answer(list(output.outputs[0].token_ids)) for output in outputs]


class VLLMNgram(VLLM):
    """vLLM with n-gram drafts."""

    speculation = {"method": "ngram", "num_speculative_tokens": LOOKUP_TOKENS, "prompt_lookup_max": 4}


class Economize(_Peer):
    """economize's prompt lookup, on CUDA graphs where there is a GPU."""

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        import economize
        from economize.techniques.lookup import LookupConfig

        super().__init__(loaded, path, room)
        self._model: Any = economize.apply(loaded.model, LookupConfig())
        self._decoding: Any = economize.DecodeConfig(cuda_graphs=loaded.model.device.type == "cuda")

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts together."""
        self._refuse_sampling(params)
        device = self._loaded.model.device
        results = self._model.decode_batch(
            [torch.tensor(ids, device=device) for ids in prompts],
            params[0].max_new_tokens,
            decoding=self._decoding,
            stop=self._eos,
        )
        return [Answer(result.tokens.tolist()) for result in results]


class FlashSpec(_Peer):
    """FlashSpec's prompt lookup, one prompt at a time, compiled where there is a GPU."""

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        import flashspec
        from flashspec.engine import NgramDrafter, TargetModel

        super().__init__(loaded, path, room)
        model = loaded.model
        target = TargetModel(str(model.config.name_or_path), model.device, model.dtype, model=model)
        config = flashspec.FlashSpecConfig(
            device=str(model.device),
            drafter_strategy="bandit",
            bandit=flashspec.BanditConfig(n_arms=1),
            sampling=flashspec.SamplingConfig(temperature=0.0),
        )
        self._engine: Any = flashspec.SpeculativeEngine(config, [NgramDrafter()], target)

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts one behind the other."""
        self._refuse_sampling(params)
        return [self._one(ids, p.max_new_tokens) for ids, p in zip(prompts, params, strict=True)]

    def _one(self, ids: list[int], max_new_tokens: int) -> Answer:
        prompt = torch.tensor([ids], device=self._loaded.model.device)
        result = self._engine.generate(prompt, max_new_tokens, eos_token_ids=self._eos)
        tokens: list[int] = result.output_ids[0, : result.n_tokens_generated].tolist()
        return Answer(tokens)
