"""Draft heads on disk: every layout loads right, or is refused by name."""

import copy
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.drafters.heads import HeadsConfig, MedusaHeads, base_fingerprint, load_heads, save_config, save_heads
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.protocol import DraftTarget
from specdec.drafters.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from tests.conftest import tiny_llama

H, V, K = 6, 11, 3
OURS, SAFE, PICKLED = "heads.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
CPU = torch.device("cpu")


class ResBlock(nn.Module):
    """Medusa's own block, as published."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def published(num_heads: int = K, num_layers: int = 1, own: bool = True) -> nn.ModuleList:
    """Heads as Medusa's code makes them; their state_dict has the published keys."""
    torch.manual_seed(0)
    last = [nn.Linear(H, V, bias=False)] if own else []
    blocks = [ResBlock() for _ in range(num_layers)]
    return nn.ModuleList(
        nn.Sequential(*copy.deepcopy(blocks), *copy.deepcopy(last)).apply(_randomize) for _ in range(num_heads)
    )


def _randomize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def target(**changes: Any) -> DraftTarget:
    weight = torch.linspace(-1, 1, V * H).view(V, H).sin()
    same = DraftTarget(H, V, CPU, torch.float32, lambda x: x @ weight.T.to(x.dtype), "feedbeef")
    return replace(same, **changes)


def random_heads(projection: Any = "own", num_layers: int = 2, **changes: Any) -> MedusaHeads:
    config = HeadsConfig(
        num_heads=K,
        num_layers=num_layers,
        hidden_size=H,
        vocab_size=V,
        projection=projection,
        base_fingerprint="feedbeef",
    )
    heads = MedusaHeads(replace(config, **changes))
    torch.manual_seed(1)
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    return heads


def write_medusa(folder: Path, tensors: dict[str, Tensor], name: str = SAFE, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    # published configs are wrong about the number of heads
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1} | config))
    return folder


# ---- the module ----


@pytest.mark.parametrize("num_layers", [1, 2])
def test_new_heads_are_the_base(num_layers: int) -> None:
    base, hidden = target(), torch.randn(4, H)
    weight = base.lm_head(torch.eye(H)).T
    own, shared = (
        MedusaHeads(HeadsConfig(num_heads=K, num_layers=num_layers, hidden_size=H, vocab_size=V, projection=p))
        for p in ("own", "shared")
    )
    own.copy_projection(weight)
    shared.copy_projection(weight)
    for heads in (own, shared):
        logits = heads(hidden, base.lm_head)
        assert logits.shape == (4, K, V)
        torch.testing.assert_close(logits, base.lm_head(hidden)[:, None].expand(4, K, V))
    assert len(shared.state_dict()) == 2 * num_layers


def test_first_heads_alone_and_gradients() -> None:
    for heads in (random_heads("own"), random_heads("shared")):
        hidden = torch.randn(2, H)
        logits = heads(hidden, target().lm_head)
        torch.testing.assert_close(heads(hidden, target().lm_head, 2), logits[:, :2])
        logits.sum().backward()
        assert all(p.grad is not None for p in heads.parameters())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 64}, "num_heads"),
        ({"num_layers": True}, "num_layers"),
        ({"hidden_size": 1.0}, "hidden_size"),
        ({"vocab_size": 1 << 30}, "vocab_size"),
        ({"projection": "mine"}, "projection"),
        ({"base_fingerprint": None}, "base_fingerprint"),
        ({"tree": [[0, 0]]}, "parent"),
    ],
)
def test_config_is_checked(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(random_heads().config, **change)


# ---- files: what loads ----


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, projection: str, dtype: torch.dtype) -> None:
    heads = random_heads(projection, tree=((0,), (1,), (0, 0))).to(dtype)
    save_heads(heads, tmp_path / "new" / "folder")
    for path in (tmp_path / "new" / "folder", str(tmp_path / "new" / "folder" / OURS)):
        loaded = load_heads(path)
        assert loaded.config == heads.config
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), heads.parameters(), strict=True))
        assert next(loaded.parameters()).dtype == dtype
    assert next(load_heads(path, target(dtype=torch.float64)).parameters()).dtype == torch.float64


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", [SAFE, PICKLED])
def test_medusa_v1(tmp_path: Path, num_layers: int, name: str) -> None:
    reference, hidden = published(5, num_layers), torch.randn(4, H)
    write_medusa(tmp_path, reference.state_dict(), name)
    for path in (tmp_path, tmp_path / name):
        heads = load_heads(path, target(), allow_pickle=True)
        assert (heads.config.num_heads, heads.config.num_layers) == (5, num_layers), "counted in the weights"
        expected = torch.stack([head(hidden) for head in reference], dim=1)
        torch.testing.assert_close(heads(hidden, target().lm_head), expected)
    assert load_heads(tmp_path, allow_pickle=True).config.vocab_size == V


def test_medusa_v2(tmp_path: Path) -> None:
    reference, hidden, base = published(4, 1, own=False), torch.randn(4, H), target()
    write_medusa(tmp_path, reference.state_dict(), version="2")
    heads = load_heads(tmp_path, base)
    expected = torch.stack([base.lm_head(head(hidden)) for head in reference], dim=1)
    torch.testing.assert_close(heads(hidden, base.lm_head), expected)
    with pytest.raises(CheckpointError, match="pass the target"):
        load_heads(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r'lacks 0.1.weight.*"version": "2"'):
        load_heads(tmp_path, base)


def test_published_becomes_ours(tmp_path: Path) -> None:
    heads = load_heads(write_medusa(tmp_path / "theirs", published().state_dict()), target())
    save_heads(heads, tmp_path / "ours")
    again = load_heads(tmp_path / "ours", target())
    assert torch.equal(again.projection, heads.projection)  # type: ignore[arg-type]


# ---- files: what is refused ----

Edit = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("2.1.weight"), "lacks 2.1.weight"),
        (lambda t: t.pop("1.0.linear.bias"), "lacks 1.0.linear.bias"),
        (lambda t: t.pop("0.0.linear.bias"), "lacks 0.0.linear.bias"),
        (lambda t: t.pop("0.1.weight"), "lacks 0.1.weight"),
        (lambda t: t.update({"9.0.linear.bias": torch.zeros(H)}), "lacks 3.0.linear.bias"),
        (lambda t: t.update({"999999999.0.linear.bias": torch.zeros(H)}), "lacks most of 1000000000 heads"),
        (lambda t: t.update({"fc.weight": torch.zeros(2)}), "holds fc.weight"),
        (lambda t: t.update({"1.0.linear.weight": torch.zeros(H, H + 1)}), r"1.0.linear.weight has shape \[6, 7\]"),
        (lambda t: t.update({"1.1.weight": torch.zeros(V + 1, H)}), "1.1.weight has shape"),
        (lambda t: t.update({"0.0.linear.bias": torch.tensor(1.0)}), "0.0.linear.bias has shape|0.0.linear.weight has"),
        (lambda t: t["2.1.weight"].fill_(float("nan")), "2.1.weight .*finite"),
        (lambda t: t.update({"2.1.weight": torch.zeros(V, H, dtype=torch.int64)}), "2.1.weight .*int64"),
        (lambda t: [t.pop(k) for k in list(t) if "linear" in k], "lacks 0.0.linear.bias"),
        (lambda t: [t.pop(k) for k in list(t)] + [t.update({"midlayer.norm": torch.zeros(1)})], "no Medusa heads"),
    ],
)
def test_medusa_flaws_are_named(tmp_path: Path, edit: Edit, match: str) -> None:
    tensors = published().state_dict()
    edit(tensors)
    with pytest.raises(CheckpointError, match=match):
        load_heads(write_medusa(tmp_path, tensors), target())


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("blocks.1.bias"), "heads.safetensors: lacks blocks.1.bias"),
        (lambda t: t.pop("projection"), "lacks projection"),
        (lambda t: t.update(extra=torch.zeros(1)), "holds extra"),
        (lambda t: t.update({"blocks.0.weight": torch.zeros(K, H, 1)}), "blocks.0.weight has shape"),
        (lambda t: t["projection"].fill_(float("inf")), "projection .*finite"),
    ],
)
def test_our_weights_flaws_are_named(tmp_path: Path, edit: Edit, match: str) -> None:
    save_heads(random_heads(), tmp_path)
    tensors = load_file(tmp_path / OURS)
    edit(tensors)
    save_file(tensors, tmp_path / OURS, {"base_fingerprint": "feedbeef"})
    with pytest.raises(CheckpointError, match=match):
        load_heads(tmp_path, target())


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (None, "config.json: missing"),
        ("{", "config.json: isn't JSON"),
        ("[]", "isn't a JSON object"),
        ({"format": "other"}, "describes"),
        ({"kind": "eagle"}, "describes.*eagle"),
        ({"version": 2}, "describes.*2"),
        ({"num_heads": K + 1}, "has shape"),
        ({"num_heads": "3"}, "num_heads must be"),
        ({"num_layers": 3}, "lacks blocks.2.bias"),
        ({"projection": "shared"}, "holds projection"),
        ({"surprise": 1}, "surprise"),
        ({"tree": 3}, "config.json"),
        ({"tree": [[0, 1]]}, "parent"),
        ({"base_fingerprint": "0"}, "different saves"),
    ],
)
def test_our_config_flaws_are_named(tmp_path: Path, config: Any, match: str) -> None:
    save_heads(random_heads(), tmp_path)
    file = tmp_path / "config.json"
    if config is None:
        file.unlink()
    elif isinstance(config, str):
        file.write_text(config)
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(CheckpointError, match=match):
        load_heads(tmp_path, target())


def test_medusa_beyond_our_bounds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_layers.*no Medusa heads"):
        load_heads(write_medusa(tmp_path, published(1, 17).state_dict()), target())


def test_heads_of_another_base(tmp_path: Path) -> None:
    """Cases g1 and i3."""
    save_heads(random_heads(), tmp_path)
    theirs = write_medusa(tmp_path / "theirs", published().state_dict())
    for path in (tmp_path, theirs):
        for change in ({"hidden_size": 8}, {"vocab_size": 12}):
            with pytest.raises(CheckpointError, match=re.escape(next(iter(change)))):
                load_heads(path, target(**change))
    with pytest.raises(CheckpointError, match="feedbeef.*another base"):
        load_heads(tmp_path, target(fingerprint="other"))
    assert load_heads(tmp_path, target(fingerprint="other"), check_base=False).config == random_heads().config


def test_missing_files(tmp_path: Path) -> None:
    for path, match in (
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path, "looked for heads.safetensors, medusa_lm_head.safetensors, medusa_lm_head.pt"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load_heads(path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a weights file"):
        load_heads(tmp_path / "notes.txt")
    save_config(random_heads().config, tmp_path)
    with pytest.raises(CheckpointError, match="heads.safetensors: no such file"):
        load_heads(tmp_path)


@pytest.mark.parametrize("name", [OURS, SAFE, PICKLED])
def test_torn_files(tmp_path: Path, name: str) -> None:
    if name == OURS:
        save_heads(random_heads(), tmp_path)
    else:
        write_medusa(tmp_path, published().state_dict(), name)
    whole = (tmp_path / name).read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            load_heads(tmp_path, target(), allow_pickle=True)


@pytest.mark.parametrize("crash_at", [1, 2])
def test_interrupted_save_leaves_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int) -> None:
    old, new = random_heads(), random_heads()
    nn.init.zeros_(new.blocks[0].bias)
    save_heads(old, tmp_path)
    (tmp_path / "state.pt").write_bytes(b"of the trainer")
    calls = []

    def crashing(source: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        os.rename(source, destination)

    monkeypatch.setattr("specdec.hub.cache.os.replace", crashing)
    with pytest.raises(KeyboardInterrupt):
        save_heads(new, tmp_path)
    expected = old if crash_at == 1 else new
    assert torch.equal(load_heads(tmp_path, target()).blocks[0].bias, expected.blocks[0].bias)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", OURS, "state.pt"}


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_pickles_are_never_executed(tmp_path: Path) -> None:
    """Case h3."""
    marker = tmp_path / "executed"
    saved = io.BytesIO()
    torch.save({"0.0.linear.weight": Payload(marker)}, saved)
    for payload in (pickle.dumps(Payload(marker)), saved.getvalue()):
        for name in (
            OURS,
            SAFE,
            PICKLED,
            "x.bin",
            "x.pkl",
            "config.json",
        ):
            folder = tmp_path / "folder"
            folder.mkdir()
            if name == OURS:
                save_config(random_heads().config, folder)
            (folder / name).write_bytes(payload)
            for path in (folder, folder / name):
                for allow in (False, True):
                    with pytest.raises(CheckpointError):
                        load_heads(path, target(), allow_pickle=allow)
                    with pytest.raises(CheckpointError):
                        make_drafter(f"medusa:{path}", target(), allow_pickle=allow)
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    assert not marker.exists()


def test_pickle_needs_a_flag_and_holds_only_tensors(tmp_path: Path) -> None:
    write_medusa(tmp_path, published().state_dict(), PICKLED)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        load_heads(tmp_path, target())
    torch.save([1, 2], tmp_path / PICKLED)
    with pytest.raises(CheckpointError, match="dict of tensors"):
        load_heads(tmp_path, target(), allow_pickle=True)


def test_fingerprint_tells_bases_apart(tiny: PreTrainedModel) -> None:
    one = tiny_llama(0, torch.float32)
    base = base_fingerprint(one)
    assert re.fullmatch("[0-9a-f]{16}", base)
    assert base_fingerprint(copy.deepcopy(one).to(torch.bfloat16)) == base
    assert base_fingerprint(copy.deepcopy(one).to(torch.bfloat16).float()) == base
    assert base_fingerprint(tiny_llama(1)) != base
    assert base_fingerprint(tiny_llama(0, num_attention_heads=2)) != base
    tied = tiny_llama(0, tie_word_embeddings=True)
    assert base_fingerprint(tied) == base_fingerprint(copy.deepcopy(tied)) != base


# ---- by name ----


def test_heads_by_name_and_by_path(tmp_path: Path) -> None:
    save_heads(random_heads(), tmp_path)
    specs = (f"medusa:{tmp_path}", str(tmp_path), tmp_path)
    by_spec = [make_drafter(spec, target(), max_nodes=4) for spec in specs]
    for drafter in (*by_spec, make_drafter("medusa", target(), max_nodes=4, path=tmp_path)):
        assert isinstance(drafter, MedusaDrafter) and len(drafter.choices) == 3
    with pytest.raises(ConfigError, match='no heads come with the package .* write "medusa:PATH"'):
        make_drafter("medusa", target())
    with pytest.raises(ConfigError, match="accepts: path, tree, max_nodes, allow_pickle, check_base"):
        make_drafter("medusa", target(), heads=5)
    with pytest.raises(ConfigError, match="pass the target"):
        make_drafter(tmp_path)
    with pytest.raises(CheckpointError, match="no such"):
        make_drafter("./no/such/folder", target())


# ---- draft vocabularies ----


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_a_draft_vocabulary_is_saved_with_the_heads(tmp_path: Path, projection: str) -> None:
    heads = random_heads(projection=projection, draft_vocab=4)
    assert heads.token_ids is not None
    heads.token_ids.copy_(torch.tensor([0, 2, 5, V - 1]))
    save_heads(heads, tmp_path)
    loaded = load_heads(tmp_path, target(dtype=torch.bfloat16))
    assert loaded.token_ids is not None and loaded.token_ids.dtype == torch.int64
    assert loaded.token_ids.tolist() == [0, 2, 5, V - 1] and loaded.config == heads.config
    labels = torch.tensor([2, 3, V - 1, -100, 0])
    assert loaded.columns_of(labels, -100).tolist() == [1, -100, 3, -100, 0]
    assert loaded.tokens_of(torch.tensor([[3, 0]])).tolist() == [[V - 1, 0]]


@pytest.mark.parametrize(
    "ids", [[0, 2, 5], [0, 2, 2, 5], [2, 0, 5, 6], [-1, 2, 5, 6], [0, 2, 5, V], [0.0, 2.0, 5.0, 6.0], None]
)
def test_a_damaged_draft_vocabulary_is_named(tmp_path: Path, ids: list[float] | None) -> None:
    save_heads(random_heads(draft_vocab=4), tmp_path)
    tensors = load_file(tmp_path / OURS)
    del tensors["token_ids"]
    save_file(tensors | ({} if ids is None else {"token_ids": torch.tensor(ids)}), tmp_path / OURS)
    with pytest.raises(CheckpointError, match=f"token_ids must be 4 different ids of {V} tokens, ascending"):
        load_heads(tmp_path, target())


def test_a_draft_vocabulary_needs_the_heads_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab must be a whole number from 1 to"):
        random_heads(draft_vocab=V + 1)
    with pytest.raises(ConfigError, match="give the DraftTarget its head_rows"):
        MedusaDrafter(random_heads(projection="shared", draft_vocab=4), target())
    own = MedusaDrafter(random_heads(projection="own", draft_vocab=4), target(), max_nodes=64)
    assert all(choice[-1] < 4 for choice in own.choices), "no more candidates than there are tokens"
