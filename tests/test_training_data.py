"""Training examples: which tokens are labels, what is refused by file and line, what is held out."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.errors import ConfigError, DataError
from specdec.training.chat import encode_answers, encode_prompt
from specdec.training.data import Example, num_prompts, read_examples, split
from tests.chats import CHATML, INST, MARKED, THINKING, NoOffsets, characters
from tests.letters import letters

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo ünit"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": " Sure \n"},
]
QUESTION = [{"role": "user", "content": "Hi"}]


def labelled(tokenizer: Any, ids: Any, mask: Any) -> str:
    return str(tokenizer.decode([i for i, label in zip(ids, mask, strict=True) if label]))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "Yo ünit<|im_end|> Sure \n<|im_end|>"),
        (MARKED, "Yo ünit<|im_end|> Sure \n<|im_end|>"),
        (INST, " Yo ünit</s>  Sure \n</s>"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda t: t, NoOffsets])
def test_answers_and_their_end_are_labels(template: str, expected: str, wrap: Any) -> None:
    tokenizer = wrap(characters(template))
    ids, mask = encode_answers(tokenizer, TALK)
    assert ids == tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False))["input_ids"]
    assert labelled(tokenizer, ids, mask) == expected
    prompt = encode_prompt(tokenizer, TALK[:1])
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)]) and mask[len(prompt)]


def test_a_template_without_end_token_labels_the_text() -> None:
    tokenizer = letters()
    ids, mask = encode_answers(tokenizer, TALK[:1] + [{"role": "assistant", "content": "Yo"}])
    assert tokenizer.decode(ids) == "<u>Hi<a>Yo" and labelled(tokenizer, ids, mask) == "Yo"


def test_a_token_across_the_seam_is_no_label() -> None:
    merged = characters(CHATML, merges=(("Ċ", "Y"),))  # the prompt's line break and the answer's Y are one token
    ids, mask = encode_answers(merged, TALK[:2])
    assert labelled(merged, ids, mask) == "o ünit<|im_end|>"
    with pytest.raises(DataError, match="gives no offsets, and its tokens run across the end of"):
        encode_answers(NoOffsets(merged), TALK[:2])  # type: ignore[arg-type]


def test_a_template_that_rewrites_earlier_turns_is_named() -> None:
    tokenizer = characters(THINKING)
    tokenizer.name_or_path = "thinker"
    ids, mask = encode_answers(tokenizer, TALK[:2])
    assert labelled(tokenizer, ids, mask) == "<t></t>Yo ünit<|im_end|>"
    with pytest.raises(DataError, match=r"template of thinker rewrites .*message 2: '<t></t>Yo.* became 'Yo"):
        encode_answers(tokenizer, TALK)


def test_examples_are_read_cut_and_counted(tmp_path: Path) -> None:
    tokenizer, said = letters(), []
    end = {"role": "user", "content": "Bye"}
    answer = {"role": "assistant", "content": "Yo"}
    data = write(tmp_path / "a.jsonl", {"messages": [*QUESTION, answer, end]}, "", {"messages": [end]})
    examples = read_examples(data, tokenizer, 9, said.append)
    assert [tokenizer.decode(e.input_ids) for e in examples] == ["<u>Hi<a>Y"]
    assert examples[0].answer == (False,) * 8 + (True,)
    assert [text.split(": ", 1)[1] for text in said] == [
        "1 of 2 examples were cut at 9 tokens",
        "1 of 2 examples were dropped: no label in 9 tokens",
    ]
    said.clear()
    assert tokenizer.decode(read_examples(data, tokenizer, 99, said.append)[0].input_ids) == "<u>Hi<a>Yo"
    with pytest.warns(UserWarning, match="1 of 2 examples were dropped"):
        read_examples(data, tokenizer, 99)
    with pytest.raises(DataError, match=r"a\.jsonl: holds no example with a label"):
        read_examples(data, tokenizer, 8, said.append)
    with pytest.raises(ConfigError, match="max_len is 1"):
        read_examples(data, tokenizer, 1)


def test_plain_text_is_all_labels(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_bytes(b"\xef\xbb\xbf\n\nOne\r\ntwo\r\n \r\n\r\nThree\n\n\n")
    examples = read_examples(data, characters(None), 50)
    assert [characters(None).decode(e.input_ids) for e in examples] == ["One\ntwo", "Three"]
    assert all(all(e.answer) for e in examples)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "isn't JSON"),
        ("[1]", r"is '\[1\]'; one JSON object must stand there"),
        ({"prompt": "x"}, r"has the keys \['prompt'\]"),
        ({"messages": "x"}, "'messages' is 'x'"),
        ({"messages": []}, r"'messages' is \[\]"),
        ({"messages": [{"role": "user", "content": [1]}]}, "must be an object with texts"),
        ({"messages": [{"role": "system", "content": "x"}]}, "refuses these messages: bad role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "begins with an answer"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, r"half a character, '.ud83d'"),
        ({"messages": "x", "category": "\udc00"}, "half a character"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    good = {"messages": [*QUESTION, {"role": "assistant", "content": "Yo"}]}
    with pytest.raises(DataError, match=rf"a\.jsonl:3: .*{message}"):
        read_examples(write(tmp_path / "a.jsonl", good, "", line, good), letters(), 99)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: can't be read \(No such file"):
        read_examples(tmp_path / "none.jsonl", letters(), 9)
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(b"\n\n\xff\n")
        with pytest.raises(DataError, match=rf"{name}:3: isn't UTF-8"):
            read_examples(tmp_path / name, letters(), 9)
    with pytest.raises(DataError, match=r"b\.jsonl:1: .*has no chat template"):
        read_examples(write(tmp_path / "b.jsonl", {"messages": QUESTION}), letters(None), 9)


def test_an_example_has_a_mark_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 token ids have 1 answer marks"):
        Example((1, 2), (True,))


def test_held_out_prompts_are_never_trained_on() -> None:
    def example(prompt: int, answer: int) -> Example:
        return Example((prompt, 7, answer), (False, False, True))

    examples = [example(i % 20, i) for i in range(60)] + [Example((i,), (True,)) for i in (1, 2, 1)]
    train, held = split(examples, 5)
    assert sorted(train + held, key=repr) == sorted(examples, key=repr)
    prompts = [{e.input_ids[:2] for e in side} for side in (train, held)]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == 5
    again = split(examples[::-1], 5)
    assert [set(side) for side in again] == [set(train), set(held)]
    assert train == [e for e in examples if e in set(train)]
    assert split(examples, 0) == (examples, [])
    assert num_prompts(examples) == 22
    for wrong in (-1, 22):
        with pytest.raises(ConfigError, match=f"held_out is {wrong}, but there are 22 different prompts"):
            split(examples, wrong)


@pytest.mark.model
def test_the_default_model(real_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model_path)
    ids, mask = encode_answers(tokenizer, TALK)
    assert labelled(tokenizer, ids, mask) == "Yo ünit<|im_end|> Sure \n<|im_end|>"
    prompt = encode_prompt(tokenizer, TALK[:3])
    assert ids[: len(prompt)] == prompt and all(mask[len(prompt) : -1]) and not mask[-1]
