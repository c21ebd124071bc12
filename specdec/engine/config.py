"""The engine's options, checked and resolved before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.cache.pages import KVLayout
from specdec.engine.memory import left_on_gpu, parse_bytes, show_bytes
from specdec.errors import ConfigError
from specdec.kernels.formats import FORMATS
from specdec.verifier.tree import MAX_NODES

_AUTO_POOL_BYTES = 1 << 30
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine. None means: choose from the model.

    Args:
        block_size: tokens a KV cache block: 16, 32 or 64.
        num_blocks: blocks in the pool; by default what fits in 1 GiB, and at least one request of `max_model_len`.
        kv_cache_memory: in place of `num_blocks`, the pool's bytes, as a number or e.g. "2GiB".
        gpu_memory_utilization: in place of both, the share of the GPU's memory that the pool may take together with
            all that is there when it is made, the weights above all. The rest is for activations and captured steps.
        max_model_len: most tokens of prompt and output; by default the model's own limit.
        max_num_seqs: requests that run at once; others wait.
        max_num_batched_tokens: most rows a forward; longer prompts are run in chunks.
        max_nodes: most tree nodes a sequence, root included, 1 to 64.
        deterministic: on a GPU a token's bits don't depend on what else is in the batch, so that speculative, batched
            and plain decoding agree in bf16 too; False takes the library's products for many rows.
        kv_cache_dtype: how keys and values are stored: "auto" as they are; "fp8" (e3m4), "fp8_e4m3" (for keys with
            channels hundreds of times the others) and "int8" take about half the room of 16 bits, "int4" less than a
            third.
        kv_group_size: values along head_dim that share a scale: 8, 16, 32, 64 or 128 in int8, 32, 64 or 128 in int4; by
            default the largest up to 64 that fits.
        prepack: multiply by copies of the weights in the order in which products read them. On an x86 CPU that is
            oneDNN's, in float32 and bfloat16: products of few rows, and prompts, take half the time. On a Hopper GPU
            it is slabs, of large models in 16 bits: a step takes 1 to 3% less. None does so where the copies take at
            most half of the memory that is left, but for `accelerate`, whose model may be trained between calls.
        cuda_graphs: on a GPU capture decode steps, where everything that they need can be captured.
        enable_prefix_caching: requests that begin with the same tokens share keys and values, also after one has ended.

    Raises:
        ConfigError: a value is out of bounds; the message names it.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_nodes: int = MAX_NODES
    deterministic: bool = True
    prepack: bool | None = None
    cuda_graphs: bool = True
    kv_cache_dtype: str = "auto"
    kv_group_size: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size not in (16, 32, 64):
            raise ConfigError(f"block_size must be 16, 32 or 64, not {self.block_size!r}")
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_nodes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("deterministic", "cuda_graphs", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.prepack is not None and not isinstance(self.prepack, bool):
            raise ConfigError(f"prepack must be True, False or None, not {self.prepack!r}")
        self._check_memory()
        if self.kv_cache_dtype not in ("auto", *FORMATS):
            names = ", ".join(FORMATS)
            raise ConfigError(f"kv_cache_dtype must be auto or one of {names}, not {self.kv_cache_dtype!r}")
        if self.kv_group_size is not None and self.kv_cache_dtype == "auto":
            raise ConfigError('kv_group_size is for quantized pages; give kv_cache_dtype="int8" or "int4" too')
        if self.max_nodes > MAX_NODES:
            raise ConfigError(f"max_nodes must be at most {MAX_NODES}, not {self.max_nodes}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can take a step"
            )

    @property
    def kv_cache_name(self) -> str:
        """How keys and values are stored, in a word: what step times depend on."""
        return self.kv_cache_dtype if self.kv_group_size is None else f"{self.kv_cache_dtype}-g{self.kv_group_size}"

    def _check_memory(self) -> None:
        names = ("num_blocks", "kv_cache_memory", "gpu_memory_utilization")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each set the size of the KV cache; give one of them")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)
        share = self.gpu_memory_utilization
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if share is not None and not (number and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share!r}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What `EngineConfig` leaves open, decided.

    Args:
        num_blocks: blocks in the pool.
        max_model_len: the longest request.
        bytes_per_token: of cache, in all layers, a draft model's included.
    """

    num_blocks: int
    max_model_len: int
    bytes_per_token: int


def resolve_limits(
    config: EngineConfig, layouts: Sequence[KVLayout], model_max_len: int, device: torch.device = _CPU
) -> Limits:
    """Fill in the sizes that depend on the model.

    Args:
        config: the options.
        layouts: keys and values that stand under the block tables: the target's, then a draft model's.
        model_max_len: positions that the model was made for.
        device: where the cache will be.

    Raises:
        ConfigError: `max_model_len` is beyond the model, or the pool can't hold one request of it.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's {model_max_len} positions")
    bytes_per_token = sum(layout.bytes_per_token for layout in layouts)
    wanted = config.max_model_len or model_max_len
    needed = -(-wanted // config.block_size)
    num_blocks, given = _num_blocks(config, bytes_per_token * config.block_size, needed, device)
    if num_blocks >= needed:
        return Limits(num_blocks, wanted, bytes_per_token)
    room = num_blocks * config.block_size
    if config.max_model_len is None and room:
        return Limits(num_blocks, room, bytes_per_token)
    most = f"or a max_model_len of at most {room}" if room else "or a smaller model"
    smaller = ', kv_cache_dtype="int8"' if config.kv_cache_dtype == "auto" else ""
    raise ConfigError(
        f"{given} holds {room} tokens, fewer than max_model_len {wanted}; give at least {needed} blocks "
        f"({show_bytes(needed * config.block_size * bytes_per_token)}){smaller} {most}"
    )


def _num_blocks(config: EngineConfig, block_bytes: int, needed: int, device: torch.device) -> tuple[int, str]:
    """Blocks in the pool, and the option that says so."""
    if config.num_blocks is not None:
        return config.num_blocks, f"num_blocks {config.num_blocks}"
    if config.kv_cache_memory is not None:
        return parse_bytes(config.kv_cache_memory) // block_bytes, f"kv_cache_memory {config.kv_cache_memory}"
    if config.gpu_memory_utilization is not None:
        left = left_on_gpu(config.gpu_memory_utilization, device)
        given = f"gpu_memory_utilization {config.gpu_memory_utilization:g} leaves {show_bytes(left)}, which"
        return left // block_bytes, given
    return max(needed, _AUTO_POOL_BYTES // block_bytes), "the pool"
