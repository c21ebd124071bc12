"""Prompts from files and from the model itself, and answers that survive whatever ends the run."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.errors import ConfigError, DataError
from specdec.training.chat import encode_prompt, user_turn
from specdec.training.data import Example
from specdec.training.distill import distill
from specdec.training.prompts import Ask, read_prompts, self_prompts, without_known, write_prompts
from tests.chats import CHATML, INST, characters
from tests.letters import letters

USER = [{"role": "user", "content": "Hi"}]
PROMPTS = [[{"role": "user", "content": text}] for text in ("One", "Two", "Three", "One", "Four")]


def test_prompts_are_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "p.jsonl"
    talk = [*USER, {"role": "assistant", "content": "Yo"}]
    write_prompts(file, [talk, [*talk, *USER, *talk[1:]]])
    assert read_prompts(file) == [USER, [*talk, *USER]]
    file.write_text('{"prompt": "Hi"}\n\n' + json.dumps({"messages": talk}))
    assert read_prompts(file) == [USER, USER]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"p\.jsonl: can't be written"):
        write_prompts(blocked / "p.jsonl", [USER])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1}', r"p:2: has the keys \['text'\]"),
        ('{"prompt": "a", "messages": []}', "p:2: has the keys"),
        ('{"prompt": 3}', "p:2: the message .* must be"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "p:2: the messages hold answers only"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / "p")
    (tmp_path / "p").write_text("\n")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(tmp_path / "p")


def test_a_users_turn_is_read_from_the_template() -> None:
    chatml, inst = characters(CHATML), characters(INST)
    turn = user_turn(chatml)
    assert chatml.decode(turn.opening) == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert (chatml.convert_ids_to_tokens(list(turn.end_ids)), turn.end_text) == (["<|im_end|>"], "")
    turn = user_turn(inst)
    assert (inst.decode(turn.opening), turn.end_text) == ("<s>[INST]", "[/INST]")
    for template, why in (("{{ messages[0].content }}", "no text of its own"), ("<u>", "writes the message 0 times")):
        with pytest.raises(DataError, match=why):
            user_turn(letters(template))


def scripted(tokenizer: Any, texts: list[str]) -> tuple[Ask, list[list[list[int]]]]:
    """Answers with one text after the other, and notes what it was asked."""
    calls: list[list[list[int]]] = []
    left = iter(texts)

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        calls.append(prompts)
        return [tokenizer(next(left))["input_ids"] for _ in prompts]

    return ask, calls


def test_the_model_writes_its_own_prompts() -> None:
    tokenizer = characters(CHATML)
    texts = [
        "  What is rain?<|im_end|>\n<|im_start|>assistant",
        "what  IS\nrain?<|im_end|>",  # again
        "It never ends",
        "short<|im_end|>",
        "x" * 41 + "<|im_end|>",
        "a <s> within<|im_end|>",
        "bad \x01\x02\x03 bytes<|im_end|>",
        "Why is it wet?<|im_end|>",
        "not needed<|im_end|>",
        "not needed either<|im_end|>",
    ]
    ask, calls = scripted(tokenizer, texts)
    prompts = self_prompts(ask, tokenizer, 2, batch=5, max_chars=40)
    assert prompts == [[{"role": "user", "content": text}] for text in ("What is rain?", "Why is it wet?")]
    assert calls == [[list(user_turn(tokenizer).opening)] * 5] * 2, "without openings"


def test_every_other_prompt_begins_with_an_opening() -> None:
    tokenizer = characters(CHATML)
    texts = ["What is rain?<|im_end|>", "  red<|im_end|>", "Why is it wet?<|im_end|>", " \n<|im_end|>"]
    ask, calls = scripted(tokenizer, [*texts, "Is it cold?<|im_end|>", " blue<|im_end|>"])
    prompts = self_prompts(ask, tokenizer, 5, openings=["Say:", "List"], batch=2)
    said = [prompt[0]["content"] for prompt in prompts]
    assert said == ["What is rain?", "Say:  red", "Why is it wet?", "Is it cold?", "Say: blue"], "one went nowhere"
    opening = user_turn(tokenizer).opening
    asked = [tokenizer.decode(ids[len(opening) :]) for call in calls for ids in call]
    assert asked == ["", "Say:", "", "List", "", "Say:"]


def test_prompts_end_when_time_is_up() -> None:
    ask, calls = scripted(characters(CHATML), ["What is rain?<|im_end|>", "Why?<|im_end|>", "Who is it?<|im_end|>"] * 2)
    left = iter([True, False])
    found = self_prompts(ask, characters(CHATML), 9, batch=3, go_on=lambda: next(left))
    assert [p[0]["content"] for p in found] == ["What is rain?", "Who is it?"] and len(calls) == 2


def test_prompts_that_share_words_with_known_ones_are_left_out() -> None:
    said = ["Tell me: one two, THREE four five?", "one two three four", "two three four", "Hi  there!", "Hi there, you"]
    prompts = [[{"role": "user", "content": text}] for text in said]
    assert without_known(prompts, ["x one two three four y", "hi there"], words=4) == [prompts[2], prompts[4]]
    assert without_known(prompts, []) == prompts


def test_a_turn_that_ends_by_text() -> None:
    tokenizer = characters(INST)
    ask, _ = scripted(tokenizer, [" What is rain? [/INST] It is</s>", " Unended at all"])
    assert self_prompts(ask, tokenizer, 1, batch=2) == [[{"role": "user", "content": "What is rain?"}]]


def test_too_few_prompts_are_counted() -> None:
    ask, calls = scripted(characters(CHATML), ["What is rain?<|im_end|>"] * 12)
    with pytest.raises(DataError, match="only 1 of 2 different prompts were found in 3 batches of 4"):
        self_prompts(ask, characters(CHATML), 2, batch=4, max_tries=3)
    assert len(calls) == 3
    with pytest.raises(ConfigError, match="count is 0"):
        self_prompts(ask, characters(CHATML), 0)


class Parrot:
    """Answers with a part of the prompt and the end token, a few calls long."""

    def __init__(self, num_calls: int = 99) -> None:
        self.num_calls = num_calls
        self.asked: list[list[int]] = []

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        self.num_calls -= 1
        if self.num_calls < 0:
            raise KeyboardInterrupt
        self.asked += prompts
        return [[*prompt[3:5], 95] for prompt in prompts]


def answer(ask: Ask, file: Path, batch: int = 2, **changes: Any) -> list[Example]:
    options = {"settings": {"temperature": 0.7}, "fingerprint": "abc", "max_len": 50} | changes
    return distill(ask, PROMPTS, letters(), file, batch=batch, **options)


def test_answers_become_examples(tmp_path: Path) -> None:
    ask = Parrot()
    examples = answer(ask, tmp_path / "new" / "answers.jsonl")
    texts = ["<u>One<a>On", "<u>Two<a>Tw", "<u>Three<a>Th", "<u>One<a>On", "<u>Four<a>Fo"]
    assert [letters().decode(e.input_ids) for e in examples] == [text + "<eos>" for text in texts]
    assert all(e.answer == (False,) * (len(e.input_ids) - 3) + (True,) * 3 for e in examples)
    assert len(ask.asked) == 4  # equal prompts are asked once
    lines = [json.loads(line) for line in (tmp_path / "new" / "answers.jsonl").read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["One", "Two", "Three", "Four"]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    expected = answer(Parrot(), tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        answer(Parrot(num_calls=1), file)
    assert file.read_text().count("\n") == 2
    for torn in (b'{"key": "12', b'{"key": "12", "answer": [1]}', "é".encode()[:1]):
        with file.open("ab") as end:
            end.write(torn)
        left = Parrot(num_calls=0)
        with pytest.raises(KeyboardInterrupt):
            answer(left, file)
    rest = Parrot()
    assert answer(rest, file) == expected and rest.asked == [encode_prompt(letters(), PROMPTS[i]) for i in (2, 4)]
    assert file.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert answer(Parrot(num_calls=0), file) == expected


def test_answers_end_when_time_is_up(tmp_path: Path) -> None:
    said: list[str] = []
    left = iter([True, False])
    part = answer(Parrot(), tmp_path / "a", go_on=lambda: next(left), report=said.append)
    assert [letters().decode(e.input_ids[:6]) for e in part] == ["<u>One", "<u>Two", "<u>One"]
    assert said == ["2 of 4 prompts without an answer were left out: the time for answers was up"]
    whole = answer(Parrot(), tmp_path / "a")
    assert [whole[i] for i in (0, 1, 3)] == part and len(whole) == 5
    assert answer(Parrot(), tmp_path / "b", go_on=lambda: False, report=said.append) == []


def test_a_line_that_was_cut_anywhere_is_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    expected = answer(Parrot(), file)
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        assert answer(Parrot(), file) == expected and file.read_bytes() == whole


@pytest.mark.parametrize("change", [{"settings": {"temperature": 0.8}}, {"fingerprint": "abd"}])
def test_other_settings_are_other_answers(tmp_path: Path, change: dict[str, Any]) -> None:
    answer(Parrot(), tmp_path / "a")
    other = Parrot()
    answer(other, tmp_path / "a", **change)
    assert len(other.asked) == 4


def test_prompts_without_room_are_dropped_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    ask = Parrot()
    examples = answer(ask, tmp_path / "a", max_len=10, report=said.append)
    assert [len(e.input_ids) for e in examples] == [10, 10, 10] and len(ask.asked) == 2
    assert said == [
        "3 of 5 answers were cut at 10 tokens of prompt and answer",
        "2 of 5 prompts were dropped as longer than 9 tokens, 0 because the answer is empty",
    ]
    with pytest.raises(DataError, match="none of 5 prompts gave an example"):
        answer(lambda prompts: [[] for _ in prompts], tmp_path / "b", report=said.append)
    assert "0 of 5 prompts were dropped as longer than 49 tokens, 5 because" in said[-1]
    with pytest.raises(ConfigError, match="batch is 0"):
        answer(ask, tmp_path / "a", batch=0)
    bad = [USER, [{"role": "system", "content": "x"}]]
    with pytest.raises(DataError, match="prompt 2: .*bad role"):
        distill(ask, bad, letters(), tmp_path / "a", settings={}, fingerprint="", max_len=9)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answers.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = answer(Parrot(), tmp_path / "whole.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            DataError, match=r"answers\.jsonl: can't be written \(No space left on device\); free space"
        ):
            answer(Parrot(), file)
    rest = Parrot()
    assert answer(rest, file) == expected and len(rest.asked) == 2


def test_a_file_that_cannot_grow_keeps_its_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    expected = answer(Parrot(), tmp_path / "whole.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # a write in the second line stops half-way
    try:
        with pytest.raises(DataError, match=r"answers\.jsonl: can't be written \(File too large\)"):
            answer(Parrot(), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == 200
    rest = Parrot()
    assert answer(rest, file) == expected and len(rest.asked) == 3
    assert file.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_place_that_cannot_be_written_is_named_before_any_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ask = Parrot()
    with pytest.raises(DataError, match=r"a\.jsonl: can't be written"):
        answer(ask, tmp_path / "file" / "a.jsonl")
    assert not ask.asked


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: isn't JSON .*; take the line out, and its prompt is asked again"),
        ('{"key": 1, "answer": []}', ":1: has no 'key' and 'answer'"),
        ('{"key": "1", "answer": [true]}', ":1: has no 'key' and 'answer'"),
    ],
)
def test_a_damaged_cache_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        answer(Parrot(), tmp_path / "a")


@pytest.mark.model
def test_the_default_models_user_turn(real_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model_path)
    turn = user_turn(tokenizer)
    text = tokenizer.decode(turn.opening)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI") and text.endswith(
        "<|im_end|>\n<|im_start|>user\n"
    )
    assert (tokenizer.convert_ids_to_tokens(list(turn.end_ids)), turn.end_text) == (["<|im_end|>"], "")
