"""What `specdec info --plan` and `--check-cache` add: what fits in memory, and what cache formats do to a model."""

from typing import Any

from specdec.cli.options import make_llm
from specdec.errors import ConfigError


def plan_facts(options: dict[str, Any]) -> dict[str, str]:
    """Put the engine together as the options say, and tell what its memory holds.

    Raises:
        ConfigError: not even one request fits; the message says what would.
    """
    from specdec.engine.memory import show_bytes
    from specdec.models.decoder import Decoder

    llm = make_llm(options)
    engine, parameters = llm.engine, list(llm.hf_model.parameters())
    limits, block_size = engine.limits, engine.config.block_size
    tokens = limits.num_blocks * block_size
    requests = tokens // (-(-limits.max_model_len // block_size) * block_size)
    native = engine.model.kv_layout.dtype
    stored = engine.pages.layout.format
    kind = str(native).removeprefix("torch.") if stored is None else f"{stored.name}, {stored.group} values a scale"
    graphs = engine.why_no_graphs
    prepacked = (
        ", and their matrices once more, prepacked"
        if isinstance(engine.model, Decoder) and engine.model.prepacked
        else ""
    )
    return {
        "weights": f"{show_bytes(sum(p.numel() * p.itemsize for p in parameters))}, "
        f"{sum(p.numel() for p in parameters):,} parameters{prepacked}",
        "graphs": f"none: {graphs}" if graphs else "taken beside the cache when a step of each size is captured",
        "kv cache": f"{show_bytes(tokens * limits.bytes_per_token)}: "
        f"{limits.num_blocks:,} blocks of {block_size} tokens",
        "bytes a token": f"{limits.bytes_per_token:,} ({kind})",
        "fits": f"{tokens:,} tokens: {requests:,} requests of {limits.max_model_len:,}; "
        f"max_num_seqs lets {engine.config.max_num_seqs:,} run at once",
    }


def check_facts(model: str, device: str, dtype: str) -> dict[str, str]:
    """Measure each format that fits the model."""
    from specdec.hub.load import load
    from specdec.kernels.formats import FORMATS
    from specdec.llm import resolve_device, resolve_dtype
    from specdec.models.cachecheck import check_cache
    from specdec.models.load import make_target

    place = resolve_device(device)
    loaded = load(model, dtype=resolve_dtype(dtype, place), device=place)
    target = make_target(loaded.model)
    facts = {}
    for name in FORMATS:
        try:
            layout = target.kv_layout.stored_as(name)
        except ConfigError as error:
            facts[f"{name} cache"] = str(error)
            continue
        report = check_cache(target, layout, loaded.tokenizer)
        facts[f"{name} cache"] = f"{report}{' — hurts this model' if report.hurts else ''}"
    return facts
