"""Prompts to measure with: the built-in ones and the files that users have."""

import json
from collections import Counter
from pathlib import Path

import pytest

from specdec.bench.dataset import CATEGORIES, load_prompts
from specdec.errors import ConfigError, DataError
from tests.letters import letters

ROOT = Path(__file__).parent.parent


def test_there_are_twenty_prompts_of_each_category_and_no_two_are_alike() -> None:
    prompts = load_prompts("builtin")
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 20)
    assert len({p.id for p in prompts}) == len({json.dumps(p.messages) for p in prompts}) == 140
    assert all(p.messages[-1]["role"] == "user" for p in prompts)
    long = [p.messages[0]["content"] for p in prompts if p.category == "long-context"]
    assert min(map(len, long)) > 5000


def test_benchmarks_links_to_the_packaged_prompts() -> None:
    link = ROOT / "benchmarks" / "prompts"
    assert str(link.readlink()) == "../specdec/bench/prompts"
    assert sorted(p.stem for p in link.glob("*.jsonl")) == sorted(CATEGORIES)


def test_a_part_of_the_prompts_keeps_their_order() -> None:
    some = load_prompts("builtin", ["maths", "chat"], most=3)
    assert [p.id for p in some] == ["chat-01", "chat-02", "chat-03", "maths-01", "maths-02", "maths-03"]


def test_a_mistyped_category_names_the_close_one() -> None:
    with pytest.raises(ConfigError, match="has no category 'math'; did you mean 'maths'"):
        load_prompts("builtin", ["math"])
    with pytest.raises(ConfigError, match="at least 1"):
        load_prompts("builtin", most=0)


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_files_that_users_have_are_read(tmp_path: Path) -> None:
    spec_bench = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write a blog.", "Make it shorter."], "reference": []},
        {"question_id": 82, "category": "math", "turns": ["What is 2 + 2?"]},
    )
    assert [(p.id, p.category, p.messages) for p in load_prompts(spec_bench)] == [
        ("81", "writing", ({"role": "user", "content": "Write a blog."},)),
        ("82", "math", ({"role": "user", "content": "What is 2 + 2?"},)),
    ]
    human_eval = write(
        tmp_path / "HumanEval.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
    )
    (prompt,) = load_prompts(human_eval)
    assert (prompt.id, prompt.category, prompt.text, prompt.messages) == ("HumanEval/0", "humaneval", "def f():\n", ())
    sharegpt = tmp_path / "ShareGPT.json"
    said = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    sharegpt.write_text(json.dumps([{"id": "a", "conversations": said}, {"id": "b", "conversations": []}]))
    (prompt,) = load_prompts(str(sharegpt))
    assert (prompt.id, prompt.category, prompt.messages) == ("a", "sharegpt", ({"role": "user", "content": "hi"},))
    ours = write(tmp_path / "ours.jsonl", {"prompt": "x"}, {"messages": [{"role": "user", "content": "y"}]})
    assert [p.messages[0]["content"] for p in load_prompts(ours)] == ["x", "y"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompt"),
        ("{", "p.jsonl:1: isn't JSON"),
        ("[1]", "must be a JSON list of objects"),
        ("[{]", "isn't JSON"),
        ('{"question": "x"}', "has the keys .*'question'.*; a prompt needs"),
        ('{"prompt": ""}', "p.jsonl:1: prompt holds no text"),
        ('{"turns": []}', "turns holds no text"),
        ('[{"conversations": [{"from": "gpt", "value": "x"}]}]', "entry 1: a human turn holds no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "ends with the user's turn"),
        ('{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}', "the id '1' stands there twice"),
    ],
)
def test_a_broken_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_prompts(str(path))


def test_an_absent_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere.jsonl"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))


def test_prompts_are_encoded_with_the_template_where_there_is_one(tmp_path: Path) -> None:
    chat, text = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "hi"}, {"task_id": "t", "prompt": "def"}))
    assert letters().decode(chat.encode(letters())) == "<u>hi<a>"
    assert letters().decode(text.encode(letters())) == "def"
    assert letters(None).decode(chat.encode(letters(None))).strip() == "hi"
