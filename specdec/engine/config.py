"""The engine's options, checked and resolved before anything is allocated."""

from dataclasses import dataclass

from specdec.cache.pages import KVLayout
from specdec.errors import ConfigError
from specdec.kernels.formats import FORMATS
from specdec.verifier.tree import MAX_NODES

_AUTO_POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine. None means: choose from the model.

    Args:
        block_size: tokens a KV cache block: 16, 32 or 64.
        num_blocks: blocks in the pool; by default what fits in 1 GiB, and at least one request of `max_model_len`.
        max_model_len: most tokens of prompt and output; by default the model's own limit.
        max_num_seqs: requests that run at once; others wait.
        max_num_batched_tokens: most rows a forward; longer prompts are run in chunks.
        max_nodes: most tree nodes a sequence, root included, 1 to 64.
        deterministic: on a GPU a token's bits don't depend on what else is in the batch, so that speculative, batched
            and plain decoding agree in bf16 too; False takes the library's products for many rows.
        kv_cache_dtype: how keys and values are stored: "auto" as they are; "fp8" and "int8" take about half the room of
            16 bits, "int4" less than a third.
        kv_group_size: values along head_dim that share a scale: 8, 16, 32, 64 or 128 in int8, 32, 64 or 128 in int4; by
            default the largest up to 64 that fits.
        cuda_graphs: on a GPU capture decode steps, where everything that they need can be captured.

    Raises:
        ConfigError: a value is out of bounds; the message names it.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_nodes: int = MAX_NODES
    deterministic: bool = True
    cuda_graphs: bool = True
    kv_cache_dtype: str = "auto"
    kv_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64):
            raise ConfigError(f"block_size must be 16, 32 or 64, not {self.block_size!r}")
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_nodes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("deterministic", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What `EngineConfig` leaves open, decided: blocks in the pool and the longest request."""

    num_blocks: int
    max_model_len: int


def resolve_limits(config: EngineConfig, layout: KVLayout, model_max_len: int) -> Limits:
    """Fill in the sizes that depend on the model.

    Args:
        config: the options.
        layout: the model's keys and values.
        model_max_len: positions that the model was made for.

    Raises:
        ConfigError: `max_model_len` is beyond the model, or a pool of `num_blocks` can't hold one request of it.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's {model_max_len} positions")
    wanted = config.max_model_len or model_max_len
    needed = -(-wanted // config.block_size)
    if config.num_blocks is None:
        return Limits(max(needed, _AUTO_POOL_BYTES // (layout.bytes_per_token * config.block_size)), wanted)
    if config.num_blocks >= needed:
        return Limits(config.num_blocks, wanted)
    room = config.num_blocks * config.block_size
    if config.max_model_len is not None:
        raise ConfigError(
            f"num_blocks {config.num_blocks} hold {room} tokens, fewer than max_model_len {wanted}; "
            f"give at least {needed} blocks or a smaller max_model_len"
        )
    return Limits(config.num_blocks, room)
