"""Hydra heads: trained as they draft, drafting trees whose candidates depend on their path, read and saved."""

import json
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

from specdec.build import build_engine
from specdec.drafters.heads import HeadsConfig, heads_kind, load_heads, make_heads, save_heads
from specdec.drafters.hydra import HydraDrafter
from specdec.drafters.hydra_heads import HydraHeads
from specdec.drafters.int8 import HostHeads
from specdec.drafters.medusa import MedusaDrafter
from specdec.drafters.protocol import DraftQuery, DraftTarget, Observation
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.recurrent_heads import RecurrentHeads
from specdec.drafters.registry import make_drafter
from specdec.engine.config import EngineConfig
from specdec.errors import CheckpointError, ConfigError
from specdec.kernels.gumbel import gumbel_noise
from specdec.params import SamplingParams
from tests.engines import drain, make_engine, outputs, run
from tests.families import tiny_model
from tests.hydra import random_hydra, walking_hydra
from tests.medusa import random_medusa, successor, walking_model

H, V, K = 6, 11, 3
CPU = torch.device("cpu")
TREE = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 1), (1, 1, 2)]
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(7))


def target(**changes: Any) -> DraftTarget:
    weight = torch.linspace(-1, 1, V * H).view(V, H).sin()
    same = DraftTarget(
        H,
        V,
        CPU,
        torch.float32,
        lambda x: x @ weight.T.to(x.dtype),
        "feedbeef",
        embed=lambda ids: EMBEDDING[ids],
    )
    return replace(same, **changes)


def config(**changes: Any) -> HeadsConfig:
    same: dict[str, Any] = {
        "kind": "hydra",
        "num_heads": K,
        "num_layers": 1,
        "hidden_size": H,
        "vocab_size": V,
        "projection": "own",
        "base_fingerprint": "feedbeef",
    }
    return HeadsConfig(**(same | changes))


def random_heads(**changes: Any) -> HydraHeads | RecurrentHeads:
    heads = make_heads(config(**changes))
    assert isinstance(heads, HydraHeads | RecurrentHeads)
    torch.manual_seed(1)
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    return heads


def query(request_id: int, length: int, max_nodes: int = 64, temperature: float = 0.0) -> DraftQuery:
    params = SamplingParams(seed=request_id + 5, temperature=temperature)
    tokens = [3] * (length - 1) + [request_id % V]
    return DraftQuery(request_id, tokens, 1 + request_id, max_nodes, params)


# ---- the module ----


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize(
    ("kind", "width", "num_layers"), [("hydra", 1, 0), ("hydra", 2, 1), ("hydra", 3, 2), ("recurrent", 2, 0)]
)
def test_teacher_forcing_is_level_by_level(projection: str, kind: str, width: int, num_layers: int) -> None:
    heads = random_heads(projection=projection, kind=kind, width=width, num_layers=num_layers)
    hidden, following = torch.randn(5, H), torch.randn(5, K + 1, H)
    states = heads.states(hidden, following)
    assert states.shape == (5, K, H)
    logits = heads.project(states, target().lm_head)
    for k in range(K):
        path, above = following[:, : k + 1], states[:, k - 1] if k else hidden
        torch.testing.assert_close(heads.next_states(hidden, path, above), states[:, k])
        alone = heads.project(heads.next_states(hidden, path, above)[:, None], target().lm_head, k)
        torch.testing.assert_close(alone, logits[:, k : k + 1])
        changed = following.clone()
        changed[:, k + 1 :] += 1  # what comes after a head's token must not be seen
        torch.testing.assert_close(heads.states(hidden, changed)[:, : k + 1], states[:, : k + 1])
        changed[:, k] += 1
        assert not torch.allclose(heads.states(hidden, changed)[:, k], states[:, k])
    torch.testing.assert_close(heads.states(hidden, following[:, :2], 2), states[:, :2])
    logits.sum().backward()
    assert all(p.grad is not None for p in heads.parameters())


def test_new_heads_are_the_identity_and_need_what_follows() -> None:
    for kind, width in (("hydra", 2), ("recurrent", 4)):
        heads, hidden = make_heads(config(kind=kind, width=None, num_layers=0)), torch.randn(4, H)
        assert heads.config.width == width
        states = heads.states(hidden, torch.randn(4, K, H))
        torch.testing.assert_close(states, hidden[:, None].expand(4, K, H))
        for following in (None, torch.randn(4, K - 1, H)):
            with pytest.raises(ValueError, match="pass following"):
                heads.states(hidden, following)


def test_medusa_heads_have_the_same_interface(tiny: PreTrainedModel) -> None:
    heads = random_medusa(tiny)._heads
    hidden = torch.randn(4, heads.config.hidden_size, dtype=torch.float64)
    states = heads.states(hidden, torch.randn(4, 3, heads.config.hidden_size))
    assert torch.equal(states, heads.states(hidden))
    assert torch.equal(heads.project(states, tiny.lm_head), heads(hidden, tiny.lm_head))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "eagle"}, "kind"),
        ({"width": 0}, "width must be"),
        ({"width": 2.0}, "width must be"),
        ({"num_layers": -1}, "num_layers must be a whole number from 0"),
        ({"kind": "medusa", "width": 2}, "width is for heads with MLPs"),
        ({"kind": "recurrent", "num_layers": 1}, "num_layers must be a whole number from 0 to 0"),
        ({"projection_bias": 1}, "projection_bias"),
        ({"projection": "shared", "projection_bias": True}, "projection_bias is for"),
    ],
)
def test_config_is_checked(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config(**change)


# ---- the drafter ----


def drafter_of(heads: HydraHeads | RecurrentHeads, **options: Any) -> HydraDrafter | RecurrentDrafter:
    if isinstance(heads, HydraHeads):
        return HydraDrafter(heads, target(), TREE, **options)
    return RecurrentDrafter(heads, target(), TREE, **options)


def naive_tree(host: HostHeads[Any], hidden: Tensor, q: DraftQuery) -> list[int]:
    """Tokens of `TREE`, one node at a time."""
    tokens: dict[tuple[int, ...], int] = {(): q.tokens[-1]}
    for choice in sorted(TREE, key=len):
        k = len(choice) - 1
        path = EMBEDDING[[tokens[choice[:d]] for d in range(k + 1)]]
        states = host.heads.states(hidden[None], path[None], k + 1)
        scores = host.project(states[:, k:], k)[0, 0]
        if q.params.temperature:
            noise = gumbel_noise(torch.tensor([q.params.seed]), torch.tensor([q.num_output + k]), V)[0]
            scores = scores.log_softmax(-1) / q.params.temperature + noise
        tokens[choice] = int(scores.argsort(descending=True)[choice[-1]])
    return [tokens[choice] for choice in TREE]


@torch.inference_mode()
@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize(("kind", "num_layers"), [("hydra", 1), ("recurrent", 0)])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp32"])
def test_each_node_ranks_what_follows_its_own_path(
    kind: str, num_layers: int, projection: str, int8: bool, request: pytest.FixtureRequest
) -> None:
    if not int8:
        request.getfixturevalue("no_int8")
    heads, hidden = random_heads(projection=projection, kind=kind, num_layers=num_layers), torch.randn(4, H)
    drafter, host = drafter_of(heads), HostHeads(heads, target().lm_head)
    assert int8 or host.heads is heads
    drafter.observe(Observation([0, 1, 2, 3], [1, 1, 1, 1], hidden))
    queries = [query(0, 2), query(1, 2, temperature=0.7), query(2, 2, 4), query(3, 2, temperature=1.5)]
    tree = drafter.propose(queries)
    assert drafter.choices == tuple(TREE)
    assert [tree.num_nodes(b) for b in range(4)] == [9, 9, 4, 9]
    assert tree.parents_of(0) == [-1, 0, 1, 0, 2, 1, 0, 3, 7]
    for b, q in enumerate(queries):
        assert tree.tokens_of(b) == [q.tokens[-1], *naive_tree(host, hidden[b], q)][: q.max_nodes]
    alone = drafter.propose(queries[3:])
    assert alone.tokens_of(0) == tree.tokens_of(3), "whatever else runs"


@torch.inference_mode()
def test_budget_takes_the_first_nodes() -> None:
    drafter = drafter_of(random_heads())
    assert drafter.propose([query(0, 4)]).num_nodes(0) == 1, "nothing was observed"
    drafter.observe(Observation([0], [3], torch.randn(3, H)))
    whole = drafter.propose([query(0, 4)]).tokens_of(0)
    for budget in range(1, 20):
        assert drafter.propose([query(0, 4, budget)]).tokens_of(0) == whole[:budget]
    assert drafter_of(random_heads(), max_nodes=3).choices == ((0,), (0, 0))
    alone = drafter_of(random_heads(), max_nodes=1)
    alone.observe(Observation([0], [3], torch.randn(3, H)))
    assert alone.choices == () and alone.propose([query(0, 4)]).num_nodes(0) == 1
    drafter.forget([0])
    assert drafter.propose([query(0, 4)]).num_nodes(0) == 1


def test_options_are_checked() -> None:
    for options, match in (({"max_nodes": 65}, "max_nodes"), ({"tree": [(V,)]}, f"{V + 1} candidates of {V} tokens")):
        with pytest.raises(ConfigError, match=match):
            HydraDrafter(random_heads(), target(), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="input embeddings"):
        HydraDrafter(random_heads(), target(embed=None))


def test_heads_that_know_the_model_are_accepted_whole() -> None:
    """Each node's child is what follows that node, so a branch that nobody takes is right about itself, too."""
    model = walking_model()
    drafter = walking_hydra(model, [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    params = [SamplingParams(max_new_tokens=21, ignore_eos=True)] * 3
    prompts = [[1, 2, 3], [40], [9] * 20]
    requests = run(make_engine(model, drafter), prompts, params)
    for prompt, tokens, request in zip(prompts, outputs(requests), requests, strict=True):
        token = prompt[-1]
        assert tokens == [token := successor(token) for _ in range(21)]
        assert request.stats.mean_acceptance_length > 3  # four a step, but for the prompt's
    drafter.observe(Observation([7], [1], torch.randn(1, 96, dtype=torch.float64)))
    tree = drafter.propose([DraftQuery(7, [5, 6], 1, 64, SamplingParams(seed=0))])
    tokens, parents = tree.tokens_of(0), tree.parents_of(0)
    assert tokens[1] == successor(6) and tokens[4] == successor(tokens[2])
    assert all(tokens[i] == successor(tokens[parents[i]]) for i in (1, 3, 4, 5))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_heads_change_no_token(temperature: float, tiny: PreTrainedModel) -> None:
    prompts = [[5, 6, 7], [50] * 18, [11, 3]]
    params = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=i) for i in range(3)]
    plain = outputs(run(make_engine(tiny), prompts, params))
    for max_nodes in (2, 5, 64):
        assert outputs(run(make_engine(tiny, random_hydra(tiny), max_nodes=max_nodes), prompts, params)) == plain


@torch.inference_mode()
def test_the_engine_gives_heads_the_models_own_scaled_embeddings(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text")
    size = model.config
    save_heads(random_heads(hidden_size=size.hidden_size, vocab_size=size.vocab_size, base_fingerprint=""), tmp_path)
    engine = build_engine(model, str(tmp_path), EngineConfig(num_blocks=16, max_model_len=64))
    assert isinstance(engine.drafter, HydraDrafter)
    weight = model.get_input_embeddings().weight
    torch.testing.assert_close(engine.drafter._guesses._embed(torch.tensor([3])), weight[3:4] * size.hidden_size**0.5)
    request = engine.add([1, 2, 3], SamplingParams(max_new_tokens=4, ignore_eos=True))
    drain(engine)
    assert request.stats.num_draft_tokens


# ---- files ----


@pytest.mark.parametrize(("projection", "bias"), [("own", False), ("own", True), ("shared", False)])
def test_round_trip(tmp_path: Path, projection: str, bias: bool) -> None:
    heads = random_heads(projection=projection, projection_bias=bias, tree=((0,), (1,), (0, 0)))
    save_heads(heads, tmp_path)
    loaded = load_heads(tmp_path, target())
    assert isinstance(loaded, HydraHeads) and loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, heads.state_dict()[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"width": 3}, "has shape"),
        ({"num_heads": 2}, "has shape|holds"),
        ({"num_layers": 2}, "lacks blocks.1.bias"),
        ({"kind": "medusa", "width": None}, "holds down.0.bias"),
        ({"kind": ["hydra"]}, "describes"),
        ({"width": "wide"}, "width must be"),
    ],
)
def test_config_flaws_are_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    save_heads(random_heads(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=match):
        load_heads(tmp_path, target())


def test_folders_from_before_there_were_kinds_still_load(tmp_path: Path) -> None:
    medusa = make_heads(config(kind="medusa"))
    save_heads(medusa, tmp_path)
    file = tmp_path / "config.json"
    old = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("width", "projection_bias")}
    file.write_text(json.dumps(old))
    assert load_heads(tmp_path, target()).config == medusa.config


def test_by_name_and_by_the_kind_of_a_bare_folder(tmp_path: Path) -> None:
    save_heads(random_heads(), tmp_path / "hydra")
    save_heads(make_heads(config(kind="medusa")), tmp_path / "medusa")
    for spec in (f"hydra:{tmp_path / 'hydra'}", str(tmp_path / "hydra"), tmp_path / "hydra"):
        drafter = make_drafter(spec, target(), max_nodes=4)
        assert isinstance(drafter, HydraDrafter) and len(drafter.choices) == 3
    assert isinstance(make_drafter(tmp_path / "medusa", target()), MedusaDrafter)
    with pytest.raises(CheckpointError, match='holds hydra heads; draft with "hydra:'):
        make_drafter(f"medusa:{tmp_path / 'hydra'}", target())
    with pytest.raises(CheckpointError, match='holds medusa heads; draft with "medusa:'):
        make_drafter(f"hydra:{tmp_path / 'medusa'}", target())


# ---- published checkpoints ----


class Block(nn.Module):
    """Hydra's own block, as published: one that also sees `num_condition` embeddings shrinks its input."""

    def __init__(self, num_condition: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(H * (num_condition + 1), H)
        self.res_connection = nn.Linear(H * (num_condition + 1), H) if num_condition else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


class Published(nn.Module):
    """Published heads; their state_dict has the published keys, the base's embedding among them."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_embed_fn = nn.Embedding.from_pretrained(EMBEDDING.clone())
        later = [Block() for _ in range(num_layers - 1)]
        self.hydra_mlp = nn.ModuleList(nn.Sequential(Block(k + 1), *later) for k in range(K))
        self.hydra_lm_head = nn.ModuleList(nn.Linear(H, V) for _ in range(K))

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        inputs = [torch.cat([hidden, following[:, : k + 1].flatten(1)], -1) for k in range(K)]
        outs = [head(mlp(x)) for head, mlp, x in zip(self.hydra_lm_head, self.hydra_mlp, inputs, strict=True)]
        return torch.stack(outs, 1)


PUBLISHED = {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}


def write(folder: Path, tensors: dict[str, Tensor], name: str = "hydra_lm_head.safetensors", **changes: Any) -> Path:
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}  # blocks of several layers share theirs
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return folder


@torch.inference_mode()
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", ["hydra_lm_head.safetensors", "hydra_lm_head.pt"])
def test_published_heads(tmp_path: Path, num_layers: int, name: str) -> None:
    theirs = Published(num_layers)
    write(tmp_path, theirs.state_dict(), name)
    hidden, following = torch.randn(5, H), torch.randn(5, K, H)
    for path in (tmp_path, tmp_path / name):
        assert heads_kind(path) == "hydra"
        heads = load_heads(path, target(), allow_pickle=True)
        assert (heads.config.num_heads, heads.config.num_layers) == (K, num_layers - 1), "counted in the weights"
        torch.testing.assert_close(
            heads.project(heads.states(hidden, following), target().lm_head), theirs(hidden, following)
        )
    save_heads(heads, tmp_path / "ours")
    assert isinstance(make_drafter(tmp_path, target(), allow_pickle=True), HydraDrafter)
    assert isinstance(make_drafter(tmp_path / "ours", target()), HydraDrafter)
    tensors = theirs.state_dict()
    del tensors["input_embed_fn.weight"]
    assert load_heads(write(tmp_path, tensors, name), target(embed=None), allow_pickle=True).config == heads.config


Edit = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("hydra_mlp.0.0.linear.bias"), "lacks hydra_mlp.0.0.linear.bias"),
        (lambda t: t.pop("hydra_mlp.2.0.res_connection.weight"), "lacks hydra_mlp.2.0.res_connection.weight"),
        (lambda t: t.pop("hydra_lm_head.1.weight"), "lacks hydra_lm_head.1.weight"),
        (lambda t: t.update({"hydra_mlp.9.0.linear.bias": torch.zeros(H)}), "lacks hydra_lm_head.3.bias"),
        (lambda t: t.update({"hydra_mlp.99999999.0.linear.bias": torch.zeros(H)}), "lacks most of 100000000 Hydra"),
        (lambda t: t.update({"hydra_mlp.1.0.linear.weight": torch.zeros(H, H)}), r"has shape \[6, 6\] instead of"),
        (lambda t: t.update({"fc.weight": torch.zeros(2)}), "holds fc.weight"),
        (lambda t: t["hydra_lm_head.1.weight"].fill_(float("nan")), "hydra_lm_head.1.weight .*finite"),
        (lambda t: t.update({"prefix_embeding_layer.norm.weight": torch.ones(H)}), "prefix-mlp"),
        (lambda t: t["input_embed_fn.weight"].mul_(1.5), "other input embeddings.*another base"),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), "lacks most of 0 Hydra heads"),
    ],
)
def test_published_flaws_are_named(tmp_path: Path, edit: Edit, match: str) -> None:
    tensors = {key: tensor.clone() for key, tensor in Published(1).state_dict().items()}
    edit(tensors)
    with pytest.raises(CheckpointError, match=match):
        load_heads(write(tmp_path, tensors), target())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hydra_head_arch", "prefix-mlp"),
        ("hydra_head_arch", "cross-attn"),
        ("hydra_head_arch", "eagle-attn"),
        ("grounded_heads", False),
        ("hidden_state_offset", 1),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, Published(1).state_dict(), **{key: value})
    with pytest.raises(CheckpointError, match=re.escape(f"{key} {value!r}")):
        load_heads(tmp_path, target())


def test_published_heads_of_another_base(tmp_path: Path) -> None:
    write(tmp_path, Published(1).state_dict())
    with pytest.raises(CheckpointError, match="hidden_size 6"):
        load_heads(tmp_path, target(hidden_size=8))
    other = target(embed=lambda ids: EMBEDDING[ids] + 1)
    with pytest.raises(CheckpointError, match="another base"):
        load_heads(tmp_path, other)
    assert load_heads(tmp_path, other, check_base=False).config.num_heads == K
    assert load_file(tmp_path / "hydra_lm_head.safetensors").keys() == Published(1).state_dict().keys()
