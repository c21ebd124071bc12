"""What OpenAI's clients may send besides what this server knows: accepted or refused, always by name."""

from typing import Any

from pydantic_core import PydanticCustomError

ACCEPTED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that change no answer: they are taken and have no effect."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that would change the answer, and the values by which they ask for nothing."""


def without_foreign_fields(data: Any) -> Any:
    """Return a request's object without nulls and without the fields above.

    Raises:
        PydanticCustomError: one of `REFUSED` asks for something.
    """
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if value is None or name in ACCEPTED:
            continue
        if name not in REFUSED:
            kept[name] = value
        elif value not in REFUSED[name]:
            raise PydanticCustomError("unsupported", "{param} is not supported by this server", {"param": name})
    return kept
