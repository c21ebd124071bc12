"""Which tokens heads with a draft vocabulary score: those that answers consist of most."""

from collections import Counter
from collections.abc import Iterable
from itertools import compress

from specdec.errors import ConfigError
from specdec.training.data import Example


def frequent_tokens(examples: Iterable[Example], count: int, vocab_size: int) -> list[int]:
    """Return the most frequent answer tokens; of those that occur equally often, or never, the lowest ids.

    Args:
        examples: to train on.
        count: how many.
        vocab_size: V of the base.

    Raises:
        ConfigError: there are fewer tokens.
    """
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"a draft vocabulary has 1 to {vocab_size} tokens, as many as the model's, not {count}")
    seen = Counter(token for example in examples for token in compress(example.input_ids, example.answer))
    return sorted(range(vocab_size), key=lambda token: (-seen[token], token))[:count]
