"""Tasks on a text, made of texts that the model wrote before: to be rewritten, translated, searched, gone on with.

Left to itself an instruct model hardly ever writes a user who brings a text along, and heads that never saw such
answers guess badly there. Here the texts are the model's answers to the orders of `specdec.training.writing`, and the
tasks are templates. Knows texts alone.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from specdec.training.chat import Messages

_MIN_FRESH = 0.3  # of a text's bytes those that are left when it is compressed: less is a text that turns in circles
_SENTENCES = re.compile(r"(?<=[^\W\d][.!?])\s+(?=[A-ZÀ-Þ\"'])")
_LAST_END = re.compile(r"(?s).*[^\W\d][.!?][\"')]?")
_FENCES = re.compile(r"```(\w*)\n(.+?)\n```", re.DOTALL)
_ITEMS = re.compile(r"(?m)^ *(?:\d+\.|[-*•]) +\S.*$")
_LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
_TONES = ("formal", "casual", "cheerful", "polite", "serious", "plain")
_TRIES = 20  # for each task wanted, before fewer are returned


@dataclass(slots=True)
class Material:
    """Texts by what they can be used for.

    Args:
        prose: passages of whole sentences, 100 to 900 characters each.
        sentences: one to three sentences, 20 to 240 characters.
        foreign: prose that isn't English, as far as its letters tell.
        code: as it stands between fences, with them.
        lists: three items or more, one a line.
    """

    prose: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)


TASKS: dict[str, tuple[str, ...]] = {
    "prose": (
        "Please put the passage below into a {tone} tone.\n\n{text}",
        "{text}\n\nSay the same in other words.",
        "Here is a draft. Improve its style without leaving anything out.\n\n{text}",
        "Make the passage below half as long.\n\n{text}",
        "{text}\n\nRewrite what stands above as a letter to a friend.",
        "Simplify the passage below so that everybody can follow it.\n\n{text}",
        "Give the passage below as bullet points.\n\n{text}",
        "Number the statements of the passage below and print one on each line.\n\n{text}",
        "Put the passage below into the future tense.\n\n{text}",
        "Retell the passage below as if it had happened to you.\n\n{text}",
        "Print the passage below once more, exactly as it stands.\n\n{text}",
        "Type out this passage unchanged.\n\n{text}",
        'Print the passage below with "{new}" wherever it says "{old}".\n\n{text}',
        "{text}\n\nAdd one fitting sentence at the end of the passage above and show all of it.",
        "Print the passage below in capital letters.\n\n{text}",
        "What is the passage below about? Answer in one sentence.\n\n{text}",
        "{text}\n\nTL;DR",
        "Give a short summary of what follows.\n\n{text}",
        "Find a title for the passage below, then print both.\n\n{text}",
        "Which names, places and numbers occur in the passage below? Make a list.\n\n{text}",
        "Note the key facts of the passage below as JSON.\n\n{text}",
        "{text}\n\nQuote the two sentences above that matter most.",
        "Pick out every noun of the passage below.\n\n{text}",
        "Arrange the facts of the passage below in a table.\n\n{text}",
        "{text}\n\nAsk three questions about the passage above and answer each by quoting it.",
        "Write out the first and the last sentence of the passage below.\n\n{text}",
        "Go on with this text:\n\n{half}",
        "Translate the passage below to {language}.\n\n{text}",
    ),
    "sentences": (
        "Say this in {language}: {text}",
        "How would you put the following in {language}?\n\n{text}",
        "{text}\n\nIn {language}, please.",
        "I need the {language} version of this message: {text}",
        "{language} translation of: {text}",
        "Mend the mistakes in the message below and leave the rest as it is.\n\n{damaged}",
        "Proofread: {damaged}",
        "Write this correctly: {damaged}",
        "Turn this into a question: {text}",
        "Give three variants of this: {text}",
    ),
    "foreign": (
        "What does this mean in English?\n\n{text}",
        "English version, please:\n\n{text}",
    ),
    "code": (
        "What does the code below do? Go through it step by step.\n\n{text}",
        "Comment every line of the code below and print it in full.\n\n{text}",
        "{text}\n\nGive the names in this code a clearer form and show the whole code.",
        "Port the code below to {other}.\n\n{text}",
        "{text}\n\nMake this code handle wrong input and print the new version.",
        "Show the code below again with type annotations.\n\n{text}",
        "Review the code below, then print a better version.\n\n{text}",
        "Write tests for the code below.\n\n{text}",
        "{text}\n\nWhich functions are called above? One a line.",
    ),
    "lists": (
        "Sort the items below by the alphabet.\n\n{text}",
        "Print the items below last to first.\n\n{text}",
        "Join the items below into one paragraph.\n\n{text}",
        "{text}\n\nGive the items above as a JSON array.",
        "Explain each item below in a sentence.\n\n{text}",
        "Translate the items below to {language}.\n\n{text}",
    ),
    "long": (
        "{text}\n\nSum up each of these notes in a sentence or two.",
        "{text}\n\nWrite out note {number} again in full.",
        "{text}\n\nList the most important facts of note {number}.",
        "{text}\n\nWhich note says the most that is useful, and why? Quote it.",
        "{text}\n\nFind a headline for every note.",
        "{text}\n\nPut note {number} into simpler words.",
        "{text}\n\nWrite five questions on these notes together with the answers.",
        "{text}\n\nWhat do the notes have in common, and where do they differ?",
    ),
}
"""Templates by the material that they take; they are no prompts of the benchmark."""
_WEIGHTS = {"prose": 10, "sentences": 6, "foreign": 1, "code": 4, "lists": 2, "long": 2}


def gather(texts: Iterable[str]) -> Material:
    """Sort texts and their parts by what tasks can be made of them; texts that turn in circles are left out.

    Args:
        texts: answers, which may be cut off: their last, incomplete sentence isn't used.
    """
    found = Material()
    for text in texts:
        if len(zlib.compress(text.encode())) < _MIN_FRESH * len(text.encode()):
            continue
        found.code += [f"```{name}\n{code}\n```" for name, code in _FENCES.findall(text) if 40 <= len(code) <= 1200]
        items = _ITEMS.findall(text)
        if 3 <= len(items) <= 12 and sum(map(len, items)) <= 900:
            found.lists.append("\n".join(items))
        if "```" in text:
            continue
        text = _whole(text)
        passages = {passage for most in (350, 900) if len(passage := _sentences(text, most)) >= 100}
        (found.foreign if _is_foreign(text) else found.prose).extend(sorted(passages))
        if not _is_foreign(text):
            short = [_sentences(text, 240, 3), *_SENTENCES.split(text)[1:]]
            found.sentences += [part for part in short if 20 <= len(part) <= 240 and "\n" not in part]
    return found


def compose_tasks(texts: Sequence[str], count: int, seed: int = 0) -> list[Messages]:
    """Make tasks of all kinds on texts.

    Args:
        texts: as for `gather`.
        count: how many different tasks.
        seed: of the choice of templates and texts.

    Returns:
        One user message each, in an order of no kind; fewer where the texts don't suffice for so many.
    """
    rng = random.Random(seed)
    makers = _makers(gather(texts), rng)
    kinds = [kind for kind in makers for _ in range(_WEIGHTS[kind])]
    found: dict[str, None] = {}
    for kind, _ in zip(cycle(kinds), range(_TRIES * count), strict=False):
        if len(found) == count:
            break
        found.setdefault(makers[kind]())
    tasks = list(found)
    rng.shuffle(tasks)
    return [[{"role": "user", "content": task}] for task in tasks]


def _makers(material: Material, rng: random.Random) -> dict[str, Callable[[], str]]:
    """For each kind that there are texts for what makes a task of it."""

    def of(kind: str, texts: list[str]) -> Callable[[], str]:
        return lambda: _fill(rng, rng.choice(TASKS[kind]), rng.choice(texts), texts)

    texts_of = {kind: getattr(material, kind) for kind in TASKS if kind != "long"}
    made = {kind: of(kind, texts) for kind, texts in texts_of.items() if texts}
    return made | ({"long": lambda: _long(rng, material.prose)} if len(material.prose) >= 3 else {})


def _fill(rng: random.Random, template: str, text: str, texts: list[str]) -> str:
    """Put a text into a template, and what else it asks for."""
    words = re.findall(r"[a-z]{5,}", text) or ["text"]
    others = re.findall(r"[a-z]{5,}", rng.choice(texts)) or ["word"]
    return template.format(
        text=text,
        half=text[: text.rfind(" ", 0, len(text) // 2)],
        damaged=_damaged(rng, text),
        tone=rng.choice(_TONES),
        language=rng.choice(_LANGUAGES),
        other=rng.choice(("JavaScript", "Java", "Python", "C++", "Go")),
        old=rng.choice(words),
        new=rng.choice(others),
    )


def _long(rng: random.Random, texts: list[str]) -> str:
    """A task on three to six texts, one below another."""
    chosen = rng.sample(texts, min(len(texts), rng.randint(3, 6)))
    text = "\n\n".join(f"Note {number}\n{text}" for number, text in enumerate(chosen, 1))
    return rng.choice(TASKS["long"]).format(text=text, number=rng.randint(1, len(chosen)))


def _damaged(rng: random.Random, text: str) -> str:
    """A text as it is typed in a hurry."""
    return " ".join(_mistyped(rng, word) for word in text.split())


def _mistyped(rng: random.Random, word: str) -> str:
    chance = rng.random()
    if chance < 0.1 and len(word) > 3:
        at = rng.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if chance < 0.15 and len(word) > 3:
        return word[:-2] + word[-1]
    return re.sub(r"[,.;:'!?]", "", word).lower() if chance < 0.6 else word


def _whole(text: str) -> str:
    """The text without what stands behind its last full sentence, and without a line that announces it."""
    first, _, rest = text.partition("\n")
    text = rest if first.endswith(":") else text
    whole = _LAST_END.match(text)
    return whole[0].strip() if whole else ""


def _sentences(text: str, most: int, count: int | None = None) -> str:
    """As many whole sentences from the first on as have at most so many characters; at most `count`."""
    ends = [*(gap.start() for gap in _SENTENCES.finditer(text)), len(text)][:count]
    return text[: max((end for end in ends if end <= most), default=0)]


def _is_foreign(text: str) -> bool:
    """English has hardly a letter beyond ASCII."""
    letters = [char for char in text if char.isalpha()]
    return sum(not char.isascii() for char in letters) > 0.01 * len(letters)
