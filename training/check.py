"""Compares the τ that is predicted for a tree with the one that the engine measures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.drafters.draft_heads import DraftHeads
from specdec.errors import ConfigError
from specdec.outputs import Completion
from specdec.training.accuracies import accuracies_of, expected_tau, joint_ranks, replayed_tau
from specdec.training.data import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ask = Callable[[list[list[int]]], Sequence[Completion]]
Prompt = tuple[list[int], str]
"""Token ids, and the category; empty if it isn't known."""


@dataclass(frozen=True, slots=True)
class TauCheck:
    """Predictions for answers beside what the engine needed for them.

    Args:
        expected: the mean over all positions of the answers, as `expected_tau` gives it.
        predicted: that of the positions where decoding stops, as `replayed_tau` gives it.
        measured: tokens a forward of the engine.
        num_tokens: tokens of all answers.
        by_category: tokens a forward of the engine by category of the prompts, where prompts have one.
        accuracies: [K][ranks], how often each candidate that the tree has a place for is right.
    """

    expected: float
    predicted: float
    measured: float
    num_tokens: int
    by_category: dict[str, float]
    accuracies: list[list[float]]

    @property
    def difference(self) -> float:
        """By what share of the measured τ the prediction is too high."""
        return self.predicted / self.measured - 1


def prompts_of(examples: Iterable[Example], limit: int) -> list[Prompt]:
    """Return the tokens before each example's first answer, and its category; at most `limit`, and none that is empty.

    Raises:
        ConfigError: no example has tokens before an answer.
    """
    firsts = ((e, e.answer.index(True)) for e in examples if True in e.answer)
    prompts = [(list(example.input_ids[:first]), example.category) for example, first in firsts if first]
    if not prompts:
        raise ConfigError("no held-out text has a prompt before its answer; give conversations, not plain text")
    return prompts[:limit]


def check_tau(
    ask: Ask,
    model: "PreTrainedModel",
    heads: DraftHeads,
    tree: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
) -> TauCheck:
    """Let the engine answer prompts, and predict τ for those very answers.

    Args:
        ask: answers prompts greedily with this tree and these heads, its budget of nodes unlimited.
        model, heads: as for `joint_ranks`.
        tree: the choices.
        prompts: token ids and category of each.

    Raises:
        ConfigError: the answers are too short to predict anything.
    """
    completions = ask([ids for ids, _ in prompts])
    examples = [
        Example((*c.prompt_token_ids, *c.token_ids), (False,) * len(c.prompt_token_ids) + (True,) * len(c.token_ids))
        for c in completions
    ]
    num_ranks = min(1 + max(choice[-1] for choice in tree), heads.config.num_columns)
    joint = joint_ranks(model, heads, examples, num_ranks)
    groups: dict[str, list[Completion]] = {}
    for completion, (_, category) in zip(completions, prompts, strict=True):
        groups.setdefault(category, []).append(completion)
    return TauCheck(
        expected=expected_tau(joint.ranks, tree),
        predicted=replayed_tau(joint, tree),
        measured=_tau(completions),
        num_tokens=sum(c.stats.num_output_tokens for c in completions),
        by_category={category: _tau(group) for category, group in sorted(groups.items()) if category},
        accuracies=accuracies_of(joint.ranks, num_ranks),
    )


def _tau(completions: Sequence[Completion]) -> float:
    """Tokens a forward."""
    num_tokens = sum(c.stats.num_output_tokens for c in completions)
    return num_tokens / sum(c.stats.num_forwards for c in completions)
