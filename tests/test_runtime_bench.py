"""The benchmark of the runtime: what it sends, how it counts, and that it runs."""

import json
import random
import statistics
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.runtime_gpu import PARTS, PROMPT_MEAN, Load, lengths, main, padded_batches, serve
from specdec import SamplingParams
from tests.conftest import tiny_llama
from tests.engines import make_engine
from tests.letters import letters


def test_lengths_have_their_mean_and_bounds() -> None:
    drawn = lengths(random.Random(0), PROMPT_MEAN, 10**6, 20_000)
    assert statistics.mean(drawn) == pytest.approx(PROMPT_MEAN, rel=0.05) and min(drawn) >= 1
    assert max(lengths(random.Random(0), PROMPT_MEAN, 50, 100)) == 50


def test_batches_are_as_wide_as_their_longest_and_not_too_large() -> None:
    prompts = [[n] * n for n in (3, 5, 2, 4, 9, 1)]
    batches = padded_batches(prompts, 15, 3)
    assert [[len(ids) for ids in batch] for batch in batches] == [[5, 5, 5], [4], [9], [1]]
    assert [ids[0] for batch in batches for ids in batch] == [3, 5, 2, 4, 9, 1]


def test_pauses_are_left_out_and_tokens_counted() -> None:
    engine, params = make_engine(tiny_llama(), max_num_seqs=1), [SamplingParams(max_new_tokens=n) for n in (3, 4, 5)]
    start = time.perf_counter()
    served = serve(engine, Load([[1], [2], [3]], params, [0.0, 5000.0, 5000.0]))
    assert time.perf_counter() - start < 1000 and served.seconds > 5000
    assert [sum(t.chunk_tokens) for t in served.timings] == [t.num_output_tokens for t in served.timings] == [3, 4, 5]
    assert all(0 < t.end - t.start < 1000 for t in served.timings)
    assert served.full_tokens_s is not None, "one waited while one ran"


def test_it_runs(tmp_path: Path) -> None:
    tiny_llama(vocab_size=96).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    command = ["--model", str(tmp_path), "--drafter", "ngram", "--requests", "8", "--few", "2", "--rounds", "1"]
    command += ["--max-num-seqs", "2", "--most-prompt", "64", "--most-new", "8", "--json", str(tmp_path / "out.json")]
    outcome = CliRunner().invoke(main, command, catch_exceptions=False)
    result = json.loads((tmp_path / "out.json").read_text())
    assert outcome.exit_code == 0 and set(PARTS) < set(result) and result["card"] and result["torch"]
    for ratio in (result["arrivals"]["saturated"], result["arrivals"]["low"], result["batching"], result["prefill"]):
        assert ratio["ratio"] > 0
