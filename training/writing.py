"""Orders to write a text, by kind and subject: what the model answers is what tasks on a text are then about.

They are written for training; the built-in benchmark has no such prompt.
"""

import random

from specdec.training.chat import Messages

FORMS = (
    "Write a short encyclopedia entry on {subject}.",
    "Write a newspaper report about {subject} with names, dates and numbers.",
    "Write a paragraph about {subject}.",
    "Write three paragraphs about the history of {subject}.",
    "Write an e-mail in which {name} asks {other} about {subject}.",
    "Write a letter in which {name} complains about {subject}.",
    "Write a notice for a community board about {subject}.",
    "Write the minutes of a meeting on {subject} that {name} and {other} attended.",
    "Write a diary entry of {name} about {subject}.",
    "Write a conversation between {name} and {other} about {subject}.",
    "Write instructions for beginners on {subject}, without numbering the steps.",
    "Write a product description for something to do with {subject}, with its price and measures.",
    "Write a travel report on {subject} by {name}.",
    "Write a review of a book on {subject}.",
    "Write an advertisement for {subject}.",
    "Write a biography of {name}, an expert on {subject}, in eight sentences.",
    "Write an announcement of an event on {subject}: when, where, how much it costs.",
    "Write a speech of {name} about {subject}, one paragraph long.",
    "Write a poem of two stanzas about {subject}.",
    "Write a fable about {subject}.",
    "Write a description of a place where one can learn about {subject}.",
    "Write a text message of {name} to {other} about {subject}.",
    "Write the release notes of an app about {subject}.",
    "Write an order or invoice of {name} for things to do with {subject}.",
    "Write a list of seven facts about {subject}.",
    "Write a shopping list for {subject}.",
    "Write a weather report and say what it means for {subject}.",
    "Write an interview in which {name} answers three questions about {subject}.",
    "Write a recipe as a plain paragraph that {name} would cook after a day of {subject}.",
    "Write a few sentences in French about {subject}.",
    "Write a few sentences in Spanish about {subject}.",
    "Write a few sentences in German about {subject}.",
    "Write a few sentences in Italian about {subject}.",
)
SUBJECTS = (
    *("beekeeping", "chess", "steam engines", "the city library", "a flooded cellar", "apple trees", "volcanoes"),
    *("a broken washing machine", "night buses", "pottery", "the school orchestra", "owls", "bicycle repair", "tea"),
    *("a lost suitcase", "mountain huts", "solar panels", "old maps", "the summer festival", "salt", "whales"),
    *("a new playground", "coffee growers", "lighthouses of the north", "a local hospital", "sailing", "wool", "bats"),
    *("a football club", "space telescopes", "the housing market", "rivers and dams", "cheese", "a dance class"),
    *("museum tickets", "the first railways", "wild flowers", "a delayed parcel", "dentists", "winter tyres", "ants"),
    *("an art exhibition", "vaccines", "public parks", "the printing press", "a noisy restaurant", "penguins"),
    *("learning the piano", "a hiking trail", "electric cars", "the Silk Road", "earthquakes", "a charity run", "ink"),
    *("a village shop", "computer games", "the Roman army", "photography", "deserts", "a swimming course", "bridges"),
    *("online banking", "tomatoes", "the moon landing", "a job as a nurse", "recycling", "glass", "a mountain rescue"),
)
NAMES = (
    *("Amara Okafor", "Lukas Brandt", "Sofia Rossi", "Kenji Mori", "Fatima Haddad", "Peter Walsh", "Ingrid Solberg"),
    *("Diego Herrera", "Mei Chen", "Anya Petrova", "Tom Becker", "Priya Nair", "Jean Moreau", "Hannah Cohen"),
    *("Samuel Osei", "Clara Jensen", "Omar Farouk", "Lucy Grant", "Mateus Silva", "Eva Horvath", "Ravi Menon"),
    *("Nadia Karim", "George Pappas", "Yuki Tanaka", "Rosa Delgado", "Emil Larsen", "Zoe Carter", "Ivan Kovac"),
)
CODE_FORMS = (
    "Write {language} code for {problem}.",
    "Write a short {language} function for {problem}, without an explanation.",
    "Write a {language} program for {problem} with an example of how it is used.",
    "Show how {problem} is done in {language}.",
)
PROBLEMS = (
    *("counting words", "sorting people by age", "reading a CSV file", "a bank account with deposits", "binary search"),
    *("checking a password", "converting temperatures", "a to-do list", "reversing a linked list", "parsing a date"),
    *("a shopping cart with discounts", "finding duplicates", "drawing a triangle of stars", "a queue of jobs"),
    *("summing a matrix", "the game of rock, paper, scissors", "validating an address", "merging two sorted lists"),
    *("a timer", "a cache with a limit", "encoding text", "grades and averages", "walking a tree", "a dice simulation"),
    *("splitting a bill", "calling a web service", "logging to a file", "prime factors", "a phone book", "bubble sort"),
)
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "SQL")
_CODE_SHARE = 0.2
_TRIES = 20  # for each order wanted, before fewer are returned


def compose_orders(count: int, seed: int = 0) -> list[Messages]:
    """Make different orders to write something, a fifth of them code.

    Args:
        count: how many.
        seed: of the choice of forms, subjects and names.

    Returns:
        One user message each; fewer where there are no more.
    """
    rng = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        found.setdefault(_code(rng) if rng.random() < _CODE_SHARE else _text(rng))
    return [[{"role": "user", "content": order}] for order in found]


def _text(rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    return rng.choice(FORMS).format(subject=rng.choice(SUBJECTS), name=name, other=other)


def _code(rng: random.Random) -> str:
    return rng.choice(CODE_FORMS).format(language=rng.choice(LANGUAGES), problem=rng.choice(PROBLEMS))
