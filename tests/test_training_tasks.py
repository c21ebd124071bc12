"""Tasks on texts, and orders to write texts: of every kind, the same for the same seed, and none of the benchmark's."""

import re
from collections.abc import Sequence

from specdec.bench.dataset import BUILTIN, load_prompts
from specdec.training.openings import OPENINGS
from specdec.training.prompts import without_known
from specdec.training.tasks import TASKS, compose_tasks, gather
from specdec.training.writing import CODE_FORMS, FORMS, compose_orders

OWL = (
    "Here is a paragraph about owls:\nThe owl sleeps by day and hunts at night, as it always has. Farmers like it for "
    "that. Its feathers are soft, so that its prey hears nothing when it comes. 2. And the"
)
FRENCH = (
    "L'été dernier, la fenêtre était fermée. Les élèves ont chanté à côté de l'église jusqu'à la tombée de la nuit."
)
CODE = "Sure:\n```python\ndef double(number):\n    return 2 * number  # twice\n```\nThat is all."
LIST = "You need:\n- two eggs\n- some flour\n- a pan"
TEXTS = (OWL, OWL.replace("owl", "fox"), OWL.replace("owl", "cat"), FRENCH, CODE, LIST)


def said(prompts: Sequence[Sequence[object]]) -> list[str]:
    return [prompt[0]["content"] for prompt in prompts]  # type: ignore[index]


def test_texts_are_sorted_by_what_can_be_done_with_them() -> None:
    found = gather([OWL, FRENCH, CODE, LIST, "round and round it goes. " * 40, "", "no end"])
    whole = OWL[OWL.index("\n") + 1 : OWL.index(" 2. And")]
    assert found.prose == [whole], "without the line that announces it, and without what was cut off"
    first, second, third = whole.split(". ")
    assert found.sentences == [whole, f"{second}.", third], "up to three from the first on, and each of the others"
    assert found.foreign == [FRENCH] and found.lists == ["- two eggs\n- some flour\n- a pan"]
    assert found.code == ["```python\ndef double(number):\n    return 2 * number  # twice\n```"]


def test_tasks_bring_texts_along() -> None:
    tasks = said(compose_tasks(TEXTS, 200, 3))
    assert len(set(tasks)) == len(tasks) == 200 and tasks == said(compose_tasks(TEXTS, 200, 3))
    assert tasks != said(compose_tasks(TEXTS, 200, 4))
    for kind, needle in (
        ("prose", "passage below"),
        ("foreign", "église"),
        ("code", "def double"),
        ("lists", "two eggs"),
    ):
        assert any(needle in task for task in tasks), kind
    assert any(task.startswith("Note 1\n") and "\n\nNote 3\n" in task for task in tasks)
    assert not any(re.search(r"\{\w+\}", task) for task in tasks), "a place in a template wasn't filled"


def test_so_few_texts_make_fewer_tasks() -> None:
    assert compose_tasks(["", "no end"], 10) == [] and compose_tasks(TEXTS, 0) == []
    few = compose_tasks([LIST], 1000)
    assert 0 < len(few) < 1000 and all("two eggs" in task for task in said(few))


def test_orders_are_different_and_repeatable() -> None:
    orders = said(compose_orders(500, 1))
    assert len(set(orders)) == 500 and orders == said(compose_orders(500, 1)) != said(compose_orders(500, 2))
    assert any("Python" in order for order in orders) and not any("{" in order for order in orders)


def test_no_template_is_a_prompt_of_the_benchmark() -> None:
    known = [message["content"] for prompt in load_prompts(BUILTIN) for message in prompt.messages]
    templates = [*OPENINGS, *FORMS, *CODE_FORMS, *(template for some in TASKS.values() for template in some)]
    prompts = [[{"role": "user", "content": re.sub(r"\{\w+\}", "", template)}] for template in templates]
    assert without_known(prompts, known, words=6) == prompts
