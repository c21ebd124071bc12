"""Prompts to measure with: the built-in ones, or a file of ours, of Spec-Bench, MT-Bench, HumanEval or ShareGPT."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError, DataError
from specdec.training.jsonl import decode, parse_object, read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin"
CATEGORIES = ("chat", "code", "rewriting", "extraction", "maths", "translation", "long-context")
"""Of the built-in prompts, 20 of each."""
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to ask.

    Args:
        id: unique in its set.
        category: kind of work; results are given for each.
        messages: a conversation that ends with the user's turn; empty where `text` is given.
        text: to be continued as it is, without a chat template.
    """

    id: str
    category: str
    messages: Messages = ()
    text: str = ""

    def encode(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """Return token ids; where the tokenizer has no chat template a conversation is its texts, one below another."""
        if self.text or not tokenizer.chat_template:
            text = self.text or "\n\n".join(message["content"] for message in self.messages) + "\n\n"
            ids: list[int] = tokenizer(text)["input_ids"]
            return ids
        chat: Any = tokenizer.apply_chat_template(list(self.messages), add_generation_prompt=True, tokenize=False)
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        return ids


def load_prompts(source: str, categories: Sequence[str] = (), most: int | None = None) -> list[Prompt]:
    """Read prompts.

    Args:
        source: "builtin", or a file: JSONL of objects with `messages` or `prompt`, a question file of Spec-Bench or
            MT-Bench (the first turn counts), HumanEval's problems, or a JSON list of ShareGPT's conversations.
        categories: those to keep; empty keeps all.
        most: prompts of each category, the first ones; None for all.

    Raises:
        DataError: the file can't be read or holds something else; the message names file and line.
        ConfigError: there is no such category.
    """
    if most is not None and most < 1:
        raise ConfigError(f"the number of prompts a category must be at least 1, not {most}")
    prompts = _builtin() if source == BUILTIN else _read(Path(source))
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for name in categories:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{source} has no category {name!r}{hint}; it has: {', '.join(known)}")
    return [p for name in known if not categories or name in categories for p in _of(prompts, name)[:most]]


def _of(prompts: Sequence[Prompt], category: str) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.category == category]


def _builtin() -> list[Prompt]:
    folder = resources.files("specdec.bench") / "prompts"
    files = [folder / f"{category}.jsonl" for category in CATEGORIES]
    lines = [(f"{file}:{n}", line) for file in files for n, line in enumerate(file.read_text("utf-8").splitlines(), 1)]
    return [_prompt(parse_object(line, where), where) for where, line in lines]


def _read(path: Path) -> list[Prompt]:
    text = decode(read_bytes(path), path).strip()
    if text.startswith("["):
        items = [(f"{path}, entry {n}", item) for n, item in enumerate(_array(text, path), 1)]
    else:
        lines = [(f"{path}:{n}", line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        items = [(where, parse_object(line, where)) for where, line in lines]
    prompts = [_prompt(item, where) for where, item in items if item.get("conversations") != []]  # ShareGPT has such
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"{path}: the id {prompt.id!r} stands there twice; give each prompt an id of its own")
        seen.add(prompt.id)
    if not prompts:
        raise DataError(f"{path}: holds no prompt")
    return prompts


def _array(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: isn't JSON ({error})") from error
    if not all(isinstance(item, dict) for item in value):
        raise DataError(f"{path}: must be a JSON list of objects")
    return list(value)


def _prompt(item: dict[str, Any], where: str) -> Prompt:
    """Read one object of any of the known kinds; its keys tell which."""
    category = str(item.get("category", ""))
    if "turns" in item:  # Spec-Bench, MT-Bench
        first = _text(item["turns"][0] if isinstance(item["turns"], list) and item["turns"] else None, where, "turns")
        return Prompt(str(item.get("question_id", where)), category or "questions", _ask(first))
    if "task_id" in item and "prompt" in item:
        return Prompt(str(item["task_id"]), category or "humaneval", text=_text(item["prompt"], where, "prompt"))
    if "conversations" in item:
        said = item["conversations"]
        human = next((t.get("value") for t in said if isinstance(t, dict) and t.get("from") in ("human", "user")), None)
        return Prompt(str(item.get("id", where)), category or "sharegpt", _ask(_text(human, where, "a human turn")))
    if "messages" in item:
        return Prompt(str(item.get("id", where)), category or "prompts", _messages(item["messages"], where))
    if "prompt" in item:
        return Prompt(str(item.get("id", where)), category or "prompts", _ask(_text(item["prompt"], where, "prompt")))
    known = "messages, prompt, turns (Spec-Bench, MT-Bench), task_id and prompt (HumanEval) or conversations (ShareGPT)"
    raise DataError(f"{where}: has the keys {sorted(item)}; a prompt needs {known}")


def _messages(value: Any, where: str) -> Messages:
    whole = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not whole or not value or value[-1]["role"] != "user":
        raise DataError(f"{where}: 'messages' must be a list of {{'role', 'content'}} that ends with the user's turn")
    return tuple(value)


def _ask(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {what} holds no text")
    return value
