"""The drop-in under a model that changes, and under several calls at once: as transformers, or by it with a warning."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specdec
from specdec.models.families import FAMILIES
from tests.conftest import tiny_llama
from tests.families import tiny_model

REASON = "transformers' own generate runs this call: "
ONE = torch.tensor([[3, 4, 5, 6, 3, 4, 5]])
ASKED = {"inputs": ONE, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def make_model() -> PreTrainedModel:
    return tiny_llama(vocab_size=96, seed=3)


class Negated(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if self.inner is None else -self.inner(x)


def replace_forward(module: torch.nn.Module) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: -own(*args, **kwargs)


def wrap(model: Any) -> None:
    model.model.layers[1].mlp = Negated(model.model.layers[1].mlp)


def replace_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = Negated()


@contextmanager
def hook_everywhere(model: Any) -> Iterator[None]:
    mlp = model.model.layers[1].mlp
    hook = lambda module, _, output: -output if module is mlp else None  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


OWN_FORWARD = r"model\.layers\.1\.mlp has a forward of its own"
REPLACED = "modules or weights were moved or replaced"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "forward of a module": (lambda m: replace_forward(m.model.layers[1].mlp), OWN_FORWARD),
    "wrapped module": (wrap, REPLACED),
    "module without weights": (replace_activation, REPLACED),
    "parametrized weight": (
        lambda m: parametrize.register_parametrization(m.model.layers[1].mlp.down_proj, "weight", Negated()),
        REPLACED,
    ),
}


@pytest.mark.parametrize("change, reason", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_module_does_otherwise_counts(change: Callable[[Any], object], reason: str) -> None:
    model = make_model()
    before = model.generate(**ASKED)
    with specdec.accelerate(model, num_blocks=64) as accelerated:
        change(model)
        with pytest.warns(UserWarning, match=REASON + reason) as caught:
            got = model.generate(**ASKED)
        assert len(caught) == 1 and accelerated.completions == []
    assert got.tolist() == model.generate(**ASKED).tolist() != before.tolist()


def test_a_hook_for_all_modules_counts() -> None:
    model = make_model()
    with specdec.accelerate(model, num_blocks=64), hook_everywhere(model):
        with pytest.warns(UserWarning, match=f"{REASON}forward hooks are on the model"):
            got = model.generate(**ASKED)
        specdec.restore(model)
        assert got.tolist() == model.generate(**ASKED).tolist() != make_model().generate(**ASKED).tolist()


def test_a_forward_that_was_there_before_counts() -> None:
    model = make_model()
    replace_forward(model.model.layers[1].mlp)
    with specdec.accelerate(model, num_blocks=64), pytest.warns(UserWarning, match=REASON + OWN_FORWARD):
        got = model.generate(**ASKED)
    assert got.tolist() == model.generate(**ASKED).tolist()


def test_a_compiled_forward_is_the_same_forward() -> None:
    model = make_model()
    model.forward = torch.compile(model.forward, backend="eager")
    with specdec.accelerate(model, num_blocks=64) as accelerated:
        got = model.generate(**ASKED)
        assert accelerated.completions
    assert got.tolist() == make_model().generate(**ASKED).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_updated_in_place_are_the_ones_that_answer(family: str) -> None:
    """An optimizer's step between two calls, with norms and projections of every kind."""
    model = tiny_model(family)
    before = model.generate(**ASKED)
    with specdec.accelerate(model, num_blocks=64) as accelerated:
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            got = model.generate(**ASKED)
            assert accelerated.completions
    assert got.tolist() == model.generate(**ASKED).tolist() != before.tolist()


class Asks(StoppingCriteria):
    """Ends a row by what the model itself answers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answer = self.model.generate(**(ASKED | {"inputs": input_ids[:, -3:], "max_new_tokens": 2}))
        return answer[:, -1] % 11 == 0


def test_a_call_within_a_call_goes_to_transformers() -> None:
    model = make_model()
    asked = ASKED | {"stopping_criteria": StoppingCriteriaList([Asks(model)])}
    expected = model.generate(**asked)
    assert expected.shape[1] < ONE.shape[1] + 20, "nothing was ended"
    with specdec.accelerate(model, num_blocks=64) as accelerated:
        with pytest.warns(UserWarning, match=f"{REASON}it is made within another call"):
            got = model.generate(**asked)
        assert accelerated.completions and accelerated.engine is not None
        assert got.tolist() == expected.tolist()
        accelerated.engine.check_integrity()
        assert accelerated.engine.pool.num_free == accelerated.engine.pool.num_blocks


def test_calls_of_several_threads_wait_for_each_other() -> None:
    model = make_model()
    prompts = [torch.tensor([[i, i + 1, i + 2]]) for i in range(16)]
    ask = lambda ids: model.generate(**(ASKED | {"inputs": ids})).tolist()  # noqa: E731
    expected = [ask(ids) for ids in prompts]
    with specdec.accelerate(model, num_blocks=64), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == expected
