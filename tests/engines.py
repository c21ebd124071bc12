"""Engines over tiny models, and what the tests compare."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from specdec.drafters.none import NoDrafter
from specdec.drafters.protocol import Drafter
from specdec.engine.config import EngineConfig
from specdec.engine.cost import CostTable
from specdec.engine.engine import Engine
from specdec.engine.lengths import LengthPredictor
from specdec.engine.request import Request
from specdec.models.load import make_target
from specdec.models.protocol import PackedModel
from specdec.params import SamplingParams
from specdec.verifier.rules import AcceptanceRule, CoupledRule

MAX_STEPS = 5000


def make_engine(
    model: PreTrainedModel | PackedModel,
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
    eos_token_ids: Sequence[int] = (),
    num_real_tokens: int | None = None,
    cost_table: CostTable | None = None,
    **config: Any,
) -> Engine:
    """An engine over a tiny model, or over one made ready already, with a pool as large as the tests need."""
    sizes: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256} | config
    return Engine(
        make_target(model) if isinstance(model, PreTrainedModel) else model,
        drafter or NoDrafter(),
        rule or CoupledRule(),
        EngineConfig(**sizes),
        eos_token_ids=eos_token_ids,
        num_real_tokens=num_real_tokens,
        seed=0,
        cost_table=cost_table,
    )


class Optimist(LengthPredictor):
    """Expects every answer to need no more room: admits whoever fits now."""

    def remaining(self, num_output: int, max_tokens: int) -> int:
        return 0


def drain(engine: Engine) -> None:
    """Run until nothing is left, checking the blocks after every step."""
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        engine.step()
        engine.check_integrity()
    assert not engine.has_work, f"still running after {MAX_STEPS} steps"
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks were not given back"
    assert not engine.node_budget._states, "the node budget still knows requests that ended"


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """Run all requests together and return them, ended; raise what one failed by."""
    requests = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    drain(engine)
    for request in requests:
        request.check()
    return requests


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    """The tokens that each request got."""
    return [r.tokens[r.prompt_len :] for r in requests]
