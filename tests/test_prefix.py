"""Prefix reuse shows in nothing but the time that it saves: tokens, blocks, salts, and what drafters make of it."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specdec import accelerate
from specdec.cache.blocks import BlockPool
from specdec.cache.filled import FilledBlocks
from specdec.cache.prefix import PrefixIndex
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.engine.engine import Engine
from specdec.engine.request import Request
from specdec.errors import InvalidRequest
from specdec.kernels.ops import triton_ops
from specdec.models.decoder import Decoder
from specdec.params import SamplingParams
from tests.conftest import VOCAB, tiny_llama
from tests.engines import Optimist, drain, make_engine, outputs, run
from tests.kernels import DEVICE
from tests.property import DRAFTERS, another, ready

SYSTEM = [(5 * i + 3) % VOCAB for i in range(37)]  # two full blocks and a part


def pool_of(num_blocks: int, block_size: int = 2) -> BlockPool:
    return BlockPool(num_blocks, PrefixIndex(block_size))


def store(pool: BlockPool, tokens: Sequence[int], salt: str | None = None) -> list[int]:
    """Compute a sequence: what is known of it is taken, the rest allocated and then known too."""
    table = pool.find(tokens, salt)
    pool.take(table, len(tokens))
    table = table + pool.allocate(-(-len(tokens) // 2) - len(table))
    pool.remember(table, tokens, len(tokens), salt)
    return table


def test_full_blocks_before_the_last_token_are_found() -> None:
    pool = pool_of(8)
    table = store(pool, [1, 2, 3, 4, 5])
    assert pool.find([1, 2, 3, 4, 5], None) == table[:2]
    assert pool.find([1, 2, 3, 4], None) == table[:1], "the last token has to be run"
    assert pool.find([1, 2, 3, 9, 5], None) == table[:1]
    assert pool.find([3, 4, 5], None) == [], "the same tokens behind others are something else"
    pool.release(table)
    assert (pool.num_free, pool.stats.num_cached_blocks) == (8, 2)
    assert store(pool, [1, 2, 3, 4, 6])[:2] == table[:2]
    assert (pool.stats.num_queried_tokens, pool.stats.num_hit_tokens) == (10, 4)


def test_the_least_recently_used_is_evicted_from_its_end() -> None:
    pool = pool_of(6)
    old, new = store(pool, [1, 2, 3, 4]), store(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.take(old, 4)
    pool.release(old)
    kept = pool.allocate(3)  # two were free
    assert pool.find([5, 6, 7, 8, 0], None) == new[:1] and pool.find([1, 2, 3, 4, 0], None) == old
    assert pool.stats.num_evictions == 1
    pool.check_integrity([kept])
    pool.forget_cached()
    assert pool.find([1, 2, 3, 4, 0], None) == [] and pool.stats.num_cached_blocks == 0
    assert pool.stats.num_evictions == 1, "what is forgotten made room for nobody"


def test_blocks_that_were_found_are_not_counted_as_room() -> None:
    pool = pool_of(3)
    pool.release(store(pool, [1, 2, 3, 4]))
    found = pool.find([1, 2, 3, 4, 5], None)
    assert pool.num_left(found) == 1


def test_a_copy_is_not_found_but_leads_on() -> None:
    """Two requests compute the same side by side: one copy is known, and what either adds is found behind it."""
    pool = pool_of(8)
    one, two = pool.allocate(2), pool.allocate(3)
    pool.remember(one, [1, 2, 3, 4], 4, None)
    pool.remember(two, [1, 2, 3, 4, 5, 6], 6, None)
    assert pool.find([1, 2, 3, 4, 5, 6, 7], None) == [*one, two[2]]
    pool.release(two)
    assert pool.stats.num_cached_blocks == 1
    pool.check_integrity([one])


class Colliding(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_a_hash_collision_gives_nobody_another_ones_blocks() -> None:
    pool = pool_of(12)
    sequences = [[Colliding(t) for t in tokens] for tokens in ([1, 2, 3, 4, 9], [5, 6, 3, 4, 9], [1, 2, 5, 6, 9])]
    assert hash(tuple(sequences[0])) == hash(tuple(sequences[1]))
    tables = [store(pool, tokens) for tokens in sequences]
    assert tables[0][0] == tables[2][0] and tables[0][1] != tables[1][1] != tables[2][1]
    assert [pool.find(tokens, None) for tokens in sequences] == [table[:2] for table in tables]


@given(
    st.lists(st.tuples(st.sampled_from("store grow release forget".split()), st.integers(0, 99)), max_size=80),
    st.booleans(),
)
def test_whatever_happens_found_blocks_hold_the_tokens(ops: list[tuple[str, int]], collide: bool) -> None:
    """A model of the contents beside the pool: a block holds all tokens up to its end, salt included."""
    pool, live = pool_of(7), []
    contents: dict[int, tuple[object, ...]] = {}
    filled = FilledBlocks(pool.versions, 2)
    lagging: dict[int, tuple[object, ...]] = {}
    token = Colliding if collide else int
    for op, n in ops:
        if op == "store":
            tokens, salt = [token(n >> i & 1) for i in range(1 + n % 6)], [None, "a"][n % 2]
            found = pool.find(tokens, salt)
            assert all(contents[b] == (salt, *tokens[: 2 * i + 2]) for i, b in enumerate(found))
            assert all(lagging[b] == contents[b] for b in found[: filled.count(found) // 2])
            missing = -(-len(tokens) // 2) - len(found)
            if missing <= pool.num_left(found):
                pool.take(found, len(tokens))
                live.append((salt, tokens, found + pool.allocate(missing)))
        elif op == "grow" and live:
            salt, tokens, table = live[n % len(live)]
            pool.remember(table, tokens, len(tokens), salt)
            for i in range(len(tokens) // 2):
                contents[table[i]] = (salt, *tokens[: 2 * i + 2])
            if n % 3 == 0:
                filled.note(table, len(tokens))
                lagging |= {b: contents[b] for b in table[: len(tokens) // 2]}
        elif op == "release" and live:
            pool.release(live.pop(n % len(live))[2])
        elif op == "forget" and n % 9 == 0:
            pool.forget_cached()
        pool.check_integrity([table for _, _, table in live])


# --- the engine -------------------------------------------------------------------------------------------------------


def asked(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=6 + seed % 15, seed=seed, temperature=[0.0, 1.3][seed % 2])


def prompt_of(seed: int) -> list[int]:
    """Prompts of a few families with shared beginnings of many lengths."""
    rng = random.Random(seed)
    start = SYSTEM if seed % 3 else SYSTEM[:20] + SYSTEM[:10]
    return [*start[: rng.choice([16, 17, 33, 37])], *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]


def poison(engine: Engine) -> None:
    """Put NaN into every block that nobody holds and nobody can find."""
    drafter = engine.drafter
    sets = [engine.pages, *([drafter._pages] if isinstance(drafter, DraftModelDrafter) and drafter._pages else [])]
    for pages in sets:
        for layer in (*pages.k, *pages.v):
            layer[engine.pool._free] = torch.nan


@pytest.fixture(scope="module")
def alone(tiny: PreTrainedModel) -> dict[int, list[int]]:
    """What plain decoding without reuse gives each prompt when nothing else runs."""
    engine = make_engine(tiny, enable_prefix_caching=False, max_num_seqs=1)
    seeds = range(24)
    return dict(zip(seeds, outputs(run(engine, [prompt_of(s) for s in seeds], [asked(s) for s in seeds])), strict=True))


@pytest.mark.parametrize("name", ["none", *sorted(DRAFTERS)])
def test_random_traffic_in_a_full_pool_gets_its_solo_answers(
    name: str, tiny: PreTrainedModel, alone: dict[int, list[int]]
) -> None:
    """Admits, aborts, preemption and eviction in any order, free blocks full of NaN, checked after every step."""
    answers: dict[int | tuple[int, ...], list[int]] = {tuple(prompt_of(s)): tokens for s, tokens in alone.items()}
    hits = preemptions = evictions = 0
    for seed, sizes in enumerate([(5, 2048), (8, 24), (20, 64)]):
        rng = random.Random(seed)
        drafter = DRAFTERS[name](tiny, answers) if name != "none" else None
        num_blocks, num_rows = sizes
        engine = make_engine(
            tiny,
            drafter,
            num_blocks=num_blocks,
            max_model_len=80,
            max_num_seqs=5,
            max_num_batched_tokens=num_rows,
            max_nodes=64 if seed else 3,
        )
        engine.scheduler.lengths = Optimist()
        live: list[tuple[int, Request]] = []
        for _ in range(70):
            roll = rng.random()
            if roll < 0.35:
                s = rng.randrange(24)
                live.append((s, engine.add(prompt_of(s), asked(s))))
            elif roll < 0.4 and live:
                engine.abort(rng.choice(live)[1])
            else:
                engine.step()
            engine.check_integrity()
            poison(engine)
        drain(engine)
        for s, request in live:
            got = request.tokens[request.prompt_len :]
            assert got == alone[s] if request.finish_reason != "abort" else got == alone[s][: len(got)]
        stats = engine.pool.stats
        hits, evictions = hits + stats.num_hit_tokens, evictions + stats.num_evictions
        preemptions += engine.scheduler.num_preemptions
    assert hits and preemptions and evictions, "nothing was shown"


def turns(engine: Engine, num_turns: int = 5) -> list[Request]:
    """A conversation: each prompt is the whole of what was said before, and a few tokens more."""
    said, requests = list(SYSTEM), []
    for turn in range(num_turns):
        said += [turn, 2 * turn + 1, 90 - turn]
        (request,) = run(engine, [said], [SamplingParams(max_new_tokens=21, seed=0)])
        requests.append(request)
        said = list(request.tokens)
    return requests


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_drafting_costs_no_reuse_in_a_conversation(name: str, tiny: PreTrainedModel) -> None:
    """CASES d3: the same cached-token count with and without drafting, the answers of earlier turns included."""
    plain = turns(make_engine(tiny))
    answers: dict[int | tuple[int, ...], list[int]] = {tuple(r.tokens[: r.prompt_len]): outputs([r])[0] for r in plain}
    drafted = turns(make_engine(tiny, DRAFTERS[name](tiny, answers)))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    want = [r.stats.num_cached_tokens for r in plain]
    computed = [0, *(len(r.tokens) - 1 for r in plain[:-1])]  # of an answer's last token only the choice is known
    assert want == [n // 16 * 16 for n in computed]
    assert abs(sum(r.stats.num_cached_tokens for r in drafted) - sum(want)) <= 0.02 * sum(want)


def test_no_reuse_across_salts(tiny: PreTrainedModel) -> None:
    """CASES h2: another tenant's prefix can't be probed; one's own is reused."""
    engine = make_engine(tiny)

    def cached(salt: str | None) -> int:
        (request,) = run(engine, [SYSTEM], [SamplingParams(max_new_tokens=2, cache_salt=salt)])
        return request.stats.num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None, "c")] == [0, 0, 0, 32, 32, 32, 0]
    for bad in ("", "x" * 257, 3):
        with pytest.raises(InvalidRequest, match="cache_salt must be a string of 1 to 256 characters"):
            SamplingParams(cache_salt=bad)  # type: ignore[arg-type]


def test_side_by_side_too_only_the_same_salt_waits_for_a_prefix_and_shares_it(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny)
    requests = [engine.add(SYSTEM, SamplingParams(max_new_tokens=3, cache_salt=salt)) for salt in ("a", "b", "a")]
    drain(engine)
    assert [r.stats.num_cached_tokens for r in requests] == [0, 0, 32]


def test_what_a_request_computed_itself_is_not_counted_as_cached(tiny: PreTrainedModel) -> None:
    """It had to make room before its first token, and found its own first blocks when it came back."""
    engine = make_engine(tiny, num_blocks=8, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=2)
    engine.scheduler.lengths = Optimist()
    first = engine.add([5 * i % VOCAB for i in range(60)], SamplingParams(max_new_tokens=40))
    while not first.num_output:
        engine.step()
    last = engine.add([7 * i % VOCAB for i in range(64)], SamplingParams(max_new_tokens=5))
    drain(engine)
    assert engine.scheduler.num_preemptions and engine.pool.stats.num_hit_tokens
    assert first.stats.num_cached_tokens == last.stats.num_cached_tokens == 0


def test_switched_off_nothing_is_kept(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny, enable_prefix_caching=False)
    requests = run(engine, [SYSTEM] * 3, [SamplingParams(max_new_tokens=3)] * 3)
    assert not any(r.stats.num_cached_tokens for r in requests)
    assert engine.pool.stats == BlockPool(1).stats


def test_scores_of_reused_prompts_are_all_there(tiny: PreTrainedModel) -> None:
    engine = make_engine(tiny)
    first, second = (engine.add(SYSTEM, asked(0), keep_scores=True, keep_logits=True) for _ in range(2))
    drain(engine)
    assert second.stats.num_cached_tokens == 32
    assert len(second.scores) == len(second.logits) == second.num_output
    torch.testing.assert_close(torch.cat(second.logits), torch.cat(first.logits), rtol=0, atol=1e-9)


@pytest.mark.parametrize("own", [True, False], ids=["the target's twin", "another model"])
def test_a_draft_model_runs_only_what_its_own_layers_lack(own: bool, tiny: PreTrainedModel) -> None:
    """After a hit it goes on from the reused blocks, and drafts what it would have drafted without reuse."""
    drafts: list[list[tuple[int, int]]] = []
    for caching in (True, False):
        drafter = DraftModelDrafter(ready(tiny) if own else another(), VOCAB, (1, 1, 1))
        engine = make_engine(tiny, drafter, enable_prefix_caching=caching)
        rows: list[int] = []
        forward = drafter._forward
        drafter._forward = lambda r, f=forward, n=rows: n.append(sum(len(s.tokens) for s in r)) or f(r)  # type: ignore[method-assign, func-returns-value]
        requests = run(engine, [SYSTEM], [asked(0)])
        rows.clear()
        requests += run(engine, [SYSTEM], [asked(0)])
        assert rows[0] == (4 if caching else 36), "36 tokens before the root, 32 of them in full blocks"
        drafts.append([(r.stats.num_draft_tokens, r.stats.num_accepted_tokens) for r in requests])
        if own:
            assert all(r.stats.accepted_by_depth == r.stats.tried_by_depth != [] for r in requests)
    assert drafts[0] == drafts[1]


def test_a_draft_model_that_stood_down_catches_up_in_reused_blocks(tiny: PreTrainedModel) -> None:
    """The target's blocks are found though the draft model never ran them; what it writes there serves the next."""
    drafter = DraftModelDrafter(ready(tiny), VOCAB, (1, 1))
    engine = make_engine(tiny, drafter)
    run(engine, [SYSTEM], [SamplingParams(max_new_tokens=1)])  # one token: nothing to draft
    first, second = (run(engine, [SYSTEM], [asked(0)])[0] for _ in range(2))
    for request in (first, second):
        assert request.stats.num_cached_tokens == 32
        assert request.stats.accepted_by_depth == request.stats.tried_by_depth != []


def test_a_preempted_request_takes_up_what_is_left_of_it(tiny: PreTrainedModel) -> None:
    params = SamplingParams(max_new_tokens=40, seed=0)
    prompts = [[i, *SYSTEM[:30]] for i in range(3)]
    want = outputs(run(make_engine(tiny), prompts, [params] * 3))
    engine = make_engine(tiny, num_blocks=9, max_model_len=96)
    requests = run(engine, prompts, [params] * 3)
    assert outputs(requests) == want and engine.scheduler.num_preemptions
    assert engine.pool.stats.num_hit_tokens >= 16
    assert not any(r.stats.num_cached_tokens for r in requests), "a request's own tokens are no cached prompt"


def test_captured_steps_leave_their_blocks_to_others() -> None:
    size: dict[str, object] = {"dtype": torch.float32, "num_hidden_layers": 1, "num_key_value_heads": 1}
    params = SamplingParams(max_new_tokens=20)
    prompt, more = SYSTEM[:17], [4, 4]
    plain = make_engine(tiny_llama(**size))
    (want,) = run(plain, [prompt], [params])
    (then,) = run(plain, [want.tokens + more], [params])
    engine = make_engine(Decoder(tiny_llama(**size).to(DEVICE), triton_ops()))
    request = engine.add(prompt, params)
    while request.num_computed < 34:
        engine.step()
    assert len(engine.pool.find(request.tokens, None)) == 2, "a running request's full blocks are known"
    drain(engine)
    (next_turn,) = run(engine, [request.tokens + more], [params])
    assert engine.graphs is not None and engine.graphs.stats.num_graphs
    assert next_turn.tokens == then.tokens and next_turn.stats.num_cached_tokens == 32


def test_updated_weights_reach_the_drop_in(tiny: PreTrainedModel) -> None:
    """Blocks that other weights filled are not taken: a call begins with none."""
    model, ids = tiny_llama(), torch.tensor([SYSTEM])
    arguments: dict[str, object] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with accelerate(model, drafter="none", num_blocks=64, max_model_len=256) as accelerated:
        before = model.generate(ids, **arguments)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        after = model.generate(ids, **arguments)
        assert accelerated.completions
    assert after.tolist() == model.generate(ids, **arguments).tolist() != before.tolist()
