"""The engine: requests in, tokens out. `Engine.step` is the algorithm of speculative decoding."""

import random
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.cache.blocks import BlockPool
from specdec.cache.pages import KVPages
from specdec.cache.prefix import PrefixIndex
from specdec.drafters.protocol import Drafter, DraftsOnDevice, KnowsChances, UsesCache
from specdec.engine.admission import check_prompt, check_token_ids
from specdec.engine.budget import NodeBudget
from specdec.engine.capturable import why_eager, why_no_graph, why_not_captured
from specdec.engine.committing import commit
from specdec.engine.config import EngineConfig, resolve_limits
from specdec.engine.cost import CostTable
from specdec.engine.drafting import draft
from specdec.engine.emit import deliver, deliver_captured
from specdec.engine.forwards import ForwardGraphs
from specdec.engine.graphs import Outcome, StepGraphs
from specdec.engine.packing import pack
from specdec.engine.recorder import Recorder
from specdec.engine.request import ABORT, Request, Stopping
from specdec.engine.scheduler import Plan, Scheduler
from specdec.engine.text import StopChecker
from specdec.errors import InvalidRequest, SpecdecError
from specdec.models.batch import Batch
from specdec.models.decoder import Decoder
from specdec.models.protocol import PackedModel
from specdec.params import MAX_SEED, SamplingParams
from specdec.verifier.rules import AcceptanceRule, VerifyQuery


class Engine:
    """Runs requests over one target, one drafter and one acceptance rule.

    Args:
        model: the target.
        drafter: guesses the trees.
        rule: decides which path is kept.
        config: sizes.
        tokenizer: for texts and stop strings; None works on token ids alone.
        eos_token_ids: tokens that end an answer.
        num_real_tokens: ids from here on pad the vocabulary and are never emitted.
        seed: of the seeds that are drawn for requests without one; None draws from the system.
        cost_table: measured step times, which set the trees' node budgets; None gives each all that `config` allows,
            but for captured steps, which draft what pays by the times that they are seen to take.
    """

    def __init__(
        self,
        model: PackedModel,
        drafter: Drafter,
        rule: AcceptanceRule,
        config: EngineConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_token_ids: Collection[int] = (),
        num_real_tokens: int | None = None,
        seed: int | None = None,
        cost_table: CostTable | None = None,
    ) -> None:
        self.model, self.drafter, self.rule, self.config = model, drafter, rule, config
        layout = model.kv_layout.stored_as(config.kv_cache_dtype, config.kv_group_size)
        own = drafter.kv_layouts if isinstance(drafter, UsesCache) else ()
        self.limits = resolve_limits(config, [layout, *(x.like(layout) for x in own)], model.max_len, model.device)
        self.pages = KVPages(layout, self.limits.num_blocks, config.block_size, model.device)
        index = PrefixIndex(config.block_size) if config.enable_prefix_caching else None
        self.pool = BlockPool(self.limits.num_blocks, index)
        if isinstance(drafter, UsesCache):
            drafter.attach(self.pages, self.pool)
        chances = drafter.node_chances if isinstance(drafter, KnowsChances) else None
        self.node_budget = NodeBudget(cost_table, config.max_nodes, chances)
        self.scheduler = Scheduler(config, self.pool, self.node_budget)
        self.num_steps = 0
        self._stepping = False
        self._aborted: list[Request] = []  # while a step ran
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._num_real_tokens = num_real_tokens or model.vocab_size
        self._ids = count()
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._recorder = Recorder(model.device)
        self.why_no_graphs = why_no_graph(model, drafter, rule) if config.cuda_graphs else "cuda_graphs is off"
        """Why decode steps aren't captured; None if they are."""
        self.graphs = None if self.why_no_graphs else self._make_graphs()
        self.forwards: Callable[[Batch], torch.Tensor] | None
        self.forwards = self._make_forwards() if config.cuda_graphs and model.device.type == "cuda" else None
        """Captured forwards of the other steps, where the model's can be captured."""

    def _make_graphs(self) -> StepGraphs:
        assert isinstance(self.model, Decoder) and isinstance(self.drafter, DraftsOnDevice)
        limit = self.limits.max_model_len
        return StepGraphs(
            self.model,
            self.pages,
            self.drafter,
            self.scheduler,
            self.node_budget,
            limit,
            self._num_real_tokens,
            self._recorder,
        )

    def _make_forwards(self) -> ForwardGraphs | None:
        if why_not_captured(self.model) is not None:
            return None
        assert isinstance(self.model, Decoder)
        return ForwardGraphs(self.model, self.pages, self.limits.max_model_len, self._recorder)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        stopping: Stopping | None = None,
        detokenize: bool = True,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> Request:
        """Queue a request for one answer; `params.n` is the caller's to spread.

        Args:
            prompt_token_ids: the prompt.
            params: what is asked for.
            priority: requests of a lower one start first and are the last to make room for others.
            stopping: called after each token with the request; says whether it ends there, besides the params' stops.
            detokenize: make `Request.text`; False leaves that to others, unless stop strings need it.
            keep_scores: collect in `Request.scores` the processed scores that each token was chosen by.
            keep_logits: collect in `Request.logits` the target's raw logits behind each token.

        Raises:
            InvalidRequest: the prompt is empty, too long, or holds ids outside the vocabulary; a parameter names such
                ids or leaves nothing to choose; or a stop string was given without a tokenizer.
        """
        prompt = list(prompt_token_ids)
        self.check(prompt, params)
        if params.seed is None:
            params = params.with_seed(self._seeds.randint(0, MAX_SEED))
        stop = self.stop_checker(prompt, params, detokenize or bool(params.stop))
        request = Request(next(self._ids), len(prompt), params, stop, prompt, priority=priority)
        request.stopping, request.keep_scores, request.keep_logits = stopping, keep_scores, keep_logits
        self.scheduler.add(request)
        return request

    def stop_checker(self, prompt: Sequence[int], params: SamplingParams, detokenize: bool = True) -> StopChecker:
        """Return what decides where an answer to the prompt ends, and makes its text if it is to detokenize."""
        room = self.limits.max_model_len - len(prompt)
        return StopChecker(params, self.eos_token_ids, self.tokenizer if detokenize else None, prompt, limit=room)

    def add_answers(self, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any) -> list[Request]:
        """Queue `params.n` requests, which share the blocks of their prompt; answer i has seed + i.

        Args:
            prompt_token_ids, params, options: as for `add`.
        """
        first = self.add(prompt_token_ids, params, **options)
        others = (params.with_seed(seed) for seed in first.params.seeds()[1:])
        return [first, *(self.add(prompt_token_ids, p, **options) for p in others)]

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what `add` would refuse. Reads nothing that changes, so any thread may ask.

        Raises:
            InvalidRequest: as in `add`.
        """
        check_prompt(prompt_token_ids, self.model.vocab_size, self.limits.max_model_len)
        check_token_ids(params, self.model.vocab_size, self._num_real_tokens, self.eos_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop strings need a tokenizer; stop is {list(params.stop)!r}")

    def abort(self, request: Request) -> None:
        """End a request and free its blocks: now, or at the end of the step that is running.

        One that has ended already stays as it is. A step may be running if a callback, or the garbage collector as it
        closes a stream, calls this.
        """
        if request.finish_reason is None:
            self._aborted.append(request)
            request.end(ABORT)
        if not self._stepping:
            self._retire()

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Request]:
        """Run one forward: every scheduled request moves on by a prompt chunk or by at least one token.

        Captured steps are launched one ahead: a call launches the next and emits the one before. A request that can't
        go on ends with `finish_reason` "error" and `Request.error`; the others don't notice. What is raised here
        concerns all: the model or the rule failed, or the user interrupted it. The requests stand as they did before,
        with the tokens that they have, and may be stepped again or aborted.

        Returns:
            The requests that ended.

        Raises:
            SpecdecError: a step is running: another thread or the step itself asked for this one.
        """
        if self._stepping:
            raise SpecdecError(
                "a step of this engine is running; another thread, or a logits processor, callback or drafter that "
                "generates, needs an engine of its own"
            )
        self._stepping = True
        try:
            self._step()
        except BaseException:
            self._begin_anew()
            raise
        finally:
            self._stepping = False
            ended = self._retire()
        return ended

    def _step(self) -> None:
        if self.graphs is not None and (outcomes := self.graphs.step()) is not None:
            self.num_steps += 1
            self._emit_captured(outcomes)
            return
        # Between captured steps this one lets requests in; for a crowd the host would draft longer than that saves.
        captured = self.graphs is not None and all(why_eager(r) is None for r in self.scheduler.running)
        plan = self.scheduler.schedule(drafts=not captured)
        self.drafter.forget([r.id for r in plan.preempted])
        tree = draft(self.drafter, plan, self.model.vocab_size)
        if not plan.items:
            return
        self.num_steps += 1
        packed = pack(plan, tree, self.config.block_size, self.model.device)
        hidden = self._forward(packed.batch)  # [N, H]
        logits = self.model.logits(hidden[packed.tree_rows])  # [nodes, V]
        accepted = self.rule(tree, logits, _verify_queries(plan, self.eos_token_ids), self._num_real_tokens)
        commit(plan, packed, accepted, hidden, self.pages, self.scheduler, self.drafter)
        for b, (item, result) in enumerate(zip(plan.decoding, accepted, strict=True)):
            if item.request.finish_reason is None:  # nobody aborted it while the step ran
                deliver(item.request, result, tree, b, logits, self.drafter.name)
                self.node_budget.observe(item.request, item.max_nodes)

    def _forward(self, batch: Batch) -> torch.Tensor:
        return self.model.forward(batch, self.pages) if self.forwards is None else self.forwards(batch)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of requests that have ended: to be called after the weights were changed."""
        self.pool.forget_cached()

    def check_integrity(self) -> None:
        """Check that no block is lost or held twice.

        Raises:
            AssertionError: one is; the message names it.
        """
        self.pool.check_integrity(r.block_table for r in self.scheduler.running)

    def _emit_captured(self, outcomes: Sequence[Outcome]) -> None:
        """Deliver what a captured step emitted."""
        for outcome in outcomes:
            request = outcome.request
            if request.finish_reason is not None:  # aborted by another one's callback
                continue
            deliver_captured(request, outcome.tokens, outcome.leaf_reached, outcome.num_nodes, self.drafter.name)
            request.num_computed += len(outcome.tokens)
            self.scheduler.remember(request)
            self.node_budget.observe(request, outcome.max_nodes, padded=True)

    def _begin_anew(self) -> None:
        """After a step that broke off, whatever it had done: compute all that run anew, from their tokens."""
        if self.graphs is not None:
            self.graphs.drop()
        self.drafter.forget([r.id for r in self.scheduler.restart()])

    def _retire(self) -> list[Request]:
        """Take out the requests that have ended since the last call, and return them."""
        ended = [r for r in self.scheduler.running if r.finish_reason is not None]
        ended += [r for r in self._aborted if r not in ended]
        self._aborted.clear()
        for request in ended:
            self.scheduler.release(request)
            self.node_budget.forget(request.id)
        if ended:
            self.drafter.forget([request.id for request in ended])
        return ended


def _verify_queries(plan: Plan, eos_token_ids: Collection[int]) -> list[VerifyQuery]:
    return [
        VerifyQuery(r.params, r.tokens, r.num_output, eos_token_ids, r.keep_scores)
        for item in plan.decoding
        for r in (item.request,)
    ]
