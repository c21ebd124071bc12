"""Heads that come with the package: found by their base, drafted with by default, shown in the demo."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from specdec import LLM
from specdec.cli.demo_prompts import PROMPTS
from specdec.cli.main import main
from specdec.drafters import shipped
from specdec.drafters.heads import HeadsConfig, base_fingerprint, load_heads, make_heads, save_heads
from specdec.drafters.heads_drafter import HeadsDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.protocol import DraftsOnDevice, KnowsChances
from specdec.drafters.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.params import SamplingParams
from tests.conftest import tiny_llama
from tests.medusa import target_of

TREE = ((0,), (1,), (0, 0))


@pytest.fixture
def heads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """New Hydra heads for the model of `folder`, shipped beside heads for another base."""
    own = base_fingerprint(AutoModelForCausalLM.from_pretrained(folder))
    for name, fingerprint in (("a-other", "0123"), ("tiny", own)):
        config = HeadsConfig(
            kind="hydra",
            num_heads=2,
            num_layers=0,
            hidden_size=32,
            vocab_size=96,
            projection="shared",
            base_fingerprint=fingerprint,
            tree=TREE,
        )
        save_heads(make_heads(config), tmp_path / name)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return tmp_path / "tiny"


def test_all_precisions_of_a_folder_are_one_base(tmp_path: Path) -> None:
    """Shipped heads are trained on the bf16 base of a GPU and used with the fp32 base of a CPU."""
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path)
    models = [LLM(tmp_path, "none", dtype=dtype, device="cpu").hf_model for dtype in ("float32", "bfloat16")]
    assert [model.dtype for model in models] == [torch.float32, torch.bfloat16]
    assert base_fingerprint(models[0]) == base_fingerprint(models[1]) != base_fingerprint(tiny_llama(1))


def test_shipped_heads_are_the_default(folder: Path, heads: Path) -> None:
    llm = LLM(folder, device="cpu")
    assert llm.engine.drafter.name == "ngram+hydra"
    named = LLM(folder, "shipped", device="cpu", drafter_options={"max_nodes": 3}).engine.drafter
    assert isinstance(named, HeadsDrafter) and named.choices == TREE[:2]
    params = SamplingParams(max_new_tokens=20)
    want = LLM(folder, "none", device="cpu").generate("hello", params)[0]
    got = llm.generate("hello", params)[0]
    assert got.token_ids == want.token_ids and got.stats.num_draft_tokens > 0
    assert LLM(folder, "ngram", device="cpu").engine.drafter.name == "ngram", "a named drafter overrides"


def test_trees_grow_on_a_cpu_where_nobody_gives_one(folder: Path, heads: Path) -> None:
    target = target_of(AutoModelForCausalLM.from_pretrained(folder))
    for name in ("shipped", "medusa", "hydra"):
        grown = make_drafter(name, target)
        assert isinstance(grown, HeadsDrafter) and grown.min_chance == shipped.MIN_CHANCES["cpu"]
    for options in ({"tree": TREE}, {"max_nodes": 3}):
        static = make_drafter("shipped", target, **options)
        assert isinstance(static, HeadsDrafter) and static.min_chance is None


def test_n_grams_with_heads_are_not_held_to_the_heads_tree(folder: Path, heads: Path) -> None:
    """Its nodes' chances would give a chain as few nodes as a tree that was cut. `both` merges trees on the host."""
    target = target_of(AutoModelForCausalLM.from_pretrained(folder))
    one, merged = make_drafter("ngram+shipped", target), make_drafter("ngram+shipped", target, both=True)
    assert isinstance(one, DraftsOnDevice) and not isinstance(one, KnowsChances)
    assert not isinstance(merged, DraftsOnDevice) and merged.name == one.name


def test_a_kind_without_a_path_names_shipped_heads(folder: Path, heads: Path) -> None:
    for name in ("medusa", "hydra", "ngram+medusa"):  # `specdec train medusa` makes all kinds
        drafter = LLM(folder, name, device="cpu").engine.drafter
        assert drafter.name in ("hydra", "ngram+hydra")
    assert LLM(folder, "medusa", device="cpu", drafter_options={"max_nodes": 3}).engine.drafter.choices == TREE[:2]
    with pytest.raises(ConfigError, match="are of the kind 'hydra', not 'recurrent'; write \"shipped\""):
        LLM(folder, "recurrent", device="cpu")


def test_other_models_draft_with_n_grams(heads: Path) -> None:
    target = target_of(tiny_llama())
    for drafter in (make_drafter("auto", target), make_drafter("auto")):
        assert isinstance(drafter, NGramDrafter)
    with pytest.raises(ConfigError, match="no heads come with the package for this model; train some"):
        make_drafter("ngram+shipped", target)


def test_damaged_shipped_heads_are_named(folder: Path, heads: Path) -> None:
    (heads / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tiny/config.json: isn't JSON"):
        LLM(folder, device="cpu")


def test_what_is_shipped_can_be_loaded_and_is_small() -> None:
    """Empty at first; whatever lies there must be whole, say its base, and keep the repository light."""
    files = [path for path in shipped.FOLDER.rglob("*") if path.is_file()]
    for folder in {path.parent for path in files}:
        assert load_heads(folder).config.base_fingerprint and load_heads(folder).config.tree
        assert (folder / "README.md").exists(), "no model card"
    assert sum(path.stat().st_size for path in files) <= 12 * 1024**2


def test_the_demo_shows_all_drafters(folder: Path, heads: Path, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    command = ["demo", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "4", "--json", str(path)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    names = ["ngram", "hydra", "ngram+hydra"]
    assert [(row["prompt"], row["drafter"]) for row in found["rows"]] == [(p, n) for p in PROMPTS for n in names]
    assert list(found["gain_over_plain"]) == names and all(gain > 0 for gain in found["gain_over_plain"].values())
    assert all(name in result.stdout for name in (*PROMPTS, *names)) and "by depth" in result.stdout, "too wide"
