"""Keep transformers' log lines and progress bars off the terminal for a while."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTY = ("torchao", "torch.utils._pytree")
"""Transformers imports torchao where it is installed, which warns of every part that this machine has no use for."""


def hush() -> None:
    """Silence for good what says its things at import, in a process that is ours: the command line's."""
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the block; its settings are as before afterwards."""
    from transformers.utils import logging as chat

    verbosity, bars = chat.get_verbosity(), chat.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    chat.set_verbosity_error()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):  # a user's environment variable may forbid to switch bars off
        chat.disable_progress_bar()
    try:
        yield
    finally:
        chat.set_verbosity(verbosity)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            chat.enable_progress_bar()
