"""Hugging Face's own `generate` as a peer: as it is, compiled over a static cache, and with its two ways to draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec.bench.systems import Answer, Room
from specdec.errors import ConfigError
from specdec.hub.load import Loaded, load
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from specdec.bench.results import Split

LOOKUP_TOKENS = 10
"""What transformers' documentation gives `prompt_lookup_num_tokens`."""


class HFGenerate:
    """`model.generate`, prompts padded on the left.

    Args:
        loaded: the target.
        path: none is used.
        room: its size of batches is used.
    """

    exact = captures = False
    drafter: str | None = None
    takes_path = False

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        if path is not None and not self.takes_path:
            raise ConfigError(f"this peer takes no path, not {path!r}")
        self._loaded, self._room = loaded, room
        assert loaded.tokenizer is not None
        pad = loaded.tokenizer.pad_token_id
        self._pad = pad if pad is not None else loaded.tokenizer.eos_token_id or 0
        self._options: dict[str, Any] = {}

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Answer prompts in batches of the room's size; the seed of a batch is its first one's."""
        size = self._room.num_seqs
        batches = [(prompts[i : i + size], params[i]) for i in range(0, len(prompts), size)]
        return [answer for batch, first in batches for answer in self._batch(batch, first)]

    def _batch(self, prompts: Sequence[list[int]], first: SamplingParams) -> list[Answer]:
        longest = max(map(len, prompts))
        rows = [[self._pad] * (longest - len(ids)) + ids for ids in prompts]
        masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        device = self._loaded.model.device
        torch.manual_seed(first.seed or 0)
        sampling = {"do_sample": True, "temperature": first.temperature, "top_k": 0, "top_p": 1.0}
        out: Any = self._loaded.model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            max_new_tokens=first.max_new_tokens,
            pad_token_id=self._pad,
            **({"do_sample": False} if first.greedy else sampling),
            **self._options,
        )
        return [Answer(self._cut(row)) for row in out[:, longest:].tolist()]

    def split(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> "Split | None":
        """Return None."""
        return None

    def _cut(self, tokens: list[int]) -> list[int]:
        """An answer up to its EOS token; what follows pads the batch."""
        config: Any = self._loaded.model.generation_config
        eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        return tokens[:end]


class HFCompiled(HFGenerate):
    """`generate` over a static cache with the forward compiled, as transformers documents it for speed."""

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        from transformers import CompileConfig

        super().__init__(loaded, path, room)
        compile_config = CompileConfig(fullgraph=False)
        compile_config._compile_all_devices = True  # else transformers compiles on GPUs only
        self._options = {"cache_implementation": "static", "compile_config": compile_config}


class _OneByOne(HFGenerate):
    """transformers drafts for one sequence at a time."""

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        super().__init__(loaded, path, replace(room, num_seqs=1))


class HFPromptLookup(_OneByOne):
    """`generate` with `prompt_lookup_num_tokens`."""

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        super().__init__(loaded, path, room)
        self._options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}


class HFAssisted(_OneByOne):
    """`generate` with an `assistant_model`: write "hf-assisted:PATH"."""

    takes_path = True

    def __init__(self, loaded: Loaded, path: str | None, room: Room) -> None:
        super().__init__(loaded, path, room)
        if path is None:
            raise ConfigError('this peer needs a draft model: write "hf-assisted:PATH"')
        assistant = load(path, dtype=loaded.model.dtype, device=loaded.model.device)
        self._options = {"assistant_model": assistant.model}
