"""Stopping criteria, asked row by row after each token."""

from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specdec.engine.request import Request, Stopping
from specdec.hf.call import Call, Criterion, NotOurs


def read_criteria(config: Any, given: Any, tokenizer: Any) -> list[Criterion]:
    """Return the criteria besides length and EOS, which the engine has itself.

    Stop strings and times are transformers' own criteria, so that they end a row where they would there: a stop
    string may begin in the prompt, and its token stays.

    Args:
        config: the prepared `GenerationConfig`.
        given: the user's criteria, or None.
        tokenizer: for stop strings, or None.

    Raises:
        NotOurs: stop strings without a tokenizer, or a criterion that would replace one of transformers' own.
    """
    criteria: list[Any] = []
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings is not None:
        if tokenizer is None:
            raise NotOurs("stop_strings without a tokenizer")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    replaceable = {MaxLengthCriteria, EosTokenCriteria, *map(type, criteria)}
    for criterion in given or ():
        if type(criterion) in replaceable or hasattr(criterion, "eos_token_id"):
            raise NotOurs(f"{type(criterion).__name__} in stopping_criteria takes the place of transformers' own")
    return criteria + list(given or ())


def row_stopping(call: Call, device: torch.device) -> Stopping | None:
    """Return what asks a call's criteria about one row, all of them after every token, as transformers does.

    They see the row alone: ids [1, L] without padding and, where scores are returned, those of its tokens so far.

    Args:
        call: the call.
        device: of the ids.
    """
    if not call.criteria:
        return None
    alone = len(call.prompts) == 1

    def stopping(request: Request) -> bool:
        ids = torch.tensor([request.tokens], device=device)
        scores = tuple(s.float() for s in request.scores) if call.output_scores else None
        return any([_answer(criterion(ids, scores), criterion, alone) for criterion in call.criteria])

    return stopping


def _answer(answer: Any, criterion: Criterion, alone: bool) -> bool:
    """Turn a criterion's answer into yes or no; one for a whole batch can't be told apart by rows."""
    if not alone and not (isinstance(answer, torch.Tensor) and answer.shape == (1,)):
        raise NotOurs(f"{type(criterion).__name__} in stopping_criteria answers for the whole batch, not for each row")
    return bool(answer)
