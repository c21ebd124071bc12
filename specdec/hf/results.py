"""From finished rows to what transformers' `generate` returns."""

from collections.abc import Sequence

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.engine.request import Request
from specdec.hf.call import Call


def assemble(call: Call, requests: Sequence[Request]) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Put the rows together: prompts as given, new tokens, padding.

    Scores and logits are float32, one [R, V] a step. Behind the end of a row transformers goes on scoring its padding;
    here such entries hold 0 for the padding token and -inf else, so that what they add to a log-probability is 0.

    Args:
        call: what was asked for.
        requests: the R rows, ended.
    """
    outputs = [request.tokens[request.prompt_len :] for request in requests]
    num_steps = max(map(len, outputs))
    pad = call.pad_token_id or 0  # without one all rows are equally long
    padded = [output + [pad] * (num_steps - len(output)) for output in outputs]
    new = torch.tensor(padded, dtype=torch.int64, device=call.input_ids.device)
    sequences = torch.cat([call.input_ids, new], dim=-1)
    if not call.as_dict:
        return sequences
    scores = [request.scores for request in requests]
    logits = [request.logits for request in requests]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_step(scores, num_steps, pad, new.device) if call.output_scores else None,
        logits=_by_step(logits, num_steps, pad, new.device) if call.output_logits else None,
    )


def _by_step(
    rows: Sequence[Sequence[torch.Tensor]], num_steps: int, pad: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """From each row's [1, V] a token to [R, V] a step."""
    ended = torch.full_like(rows[0][0], -torch.inf)
    ended[0, pad] = 0
    steps = ([row[step] if step < len(row) else ended for row in rows] for step in range(num_steps))
    return tuple(torch.cat(step).to(device=device, dtype=torch.float32) for step in steps)
