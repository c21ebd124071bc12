"""The text of an output is the whole decode, streamed; and an output ends where plain decoding would end it."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.engine.text import IncrementalDetokenizer, Step, StopChecker, decoder_of
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Observation: stop here. User: and then? Stop.",
    "你好，世界。今天天气很好。",
    "café naïve übergroß",
    "😀😀😀😀 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽",
    "1 + 1 = 2\n\n    indented\ttabbed",
]
TRICKY = ["😀", "你好", "👩‍👩‍👧‍👦🏳️‍🌈", " leading", "  two", "a�b", "�", "\u200d", "\n\n", "é", "stop here"]


# --- tokenizers -----------------------------------------------------------------------------------------------------


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add a special token, a second one, and an added token that is not special."""
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind, trained; few merges, so that characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return wrap(tokenizer)


@cache
def byte_level_across() -> PreTrainedTokenizerFast:
    """Byte-level with tokens that begin inside one character and end inside the next, besides all single bytes."""
    byte_char = {bytes([b]): c for c, b in GPT2_BYTES.items()}
    pieces = [bytes([b]) for b in range(256)]
    pieces += [b"\x80\xf0", b"\x80\xf0\x9f", b"\x9f\x98", b"\x98\x80\xf0\x9f", b"x\xe4", b"\xbd\xa0\xe5", b"\xa5\xbdx"]
    vocab = {"".join(byte_char[bytes([b])] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def sentencepiece_vocab() -> dict[str, int]:
    words = [
        "▁",
        "▁▁",
        "▁▁▁▁",
        "a",
        "b",
        "s",
        "t",
        "o",
        "p",
        ".",
        "\n",
        "é",
        "▁a",
        "▁stop",
        "▁here",
        "st",
        "op",
        "lead",
    ]
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {piece: i for i, piece in enumerate(pieces)}


@cache
def metaspace_unigram() -> PreTrainedTokenizerFast:
    """T5's and newer SentencePiece models' kind: the decoder drops the first token's leading spaces."""
    vocab = [(piece, -2.0 - (piece.startswith("<"))) for piece in sentencepiece_vocab()]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return wrap(tokenizer)


@cache
def llama_bpe() -> PreTrainedTokenizerFast:
    """Llama 2's kind: the decoder strips one space from the start of the whole text."""
    merges = [("s", "t"), ("o", "p")]
    tokenizer = Tokenizer(models.BPE(sentencepiece_vocab(), merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer)


class SlowBytes(PreTrainedTokenizer):
    """A tokenizer in pure Python: one token a byte."""

    vocab_files_names = {}

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {f"{b:02x}": b for b in range(256)} | self._added_tokens_encoder

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [f"{b:02x}" for b in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token, 16)

    def _convert_id_to_token(self, index: int) -> str:
        return f"{index:02x}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        added = self._added_tokens_encoder
        return b"".join(t.encode() if t in added else bytes.fromhex(t) for t in tokens).decode(errors="replace")


@cache
def slow_bytes() -> PreTrainedTokenizerBase:
    tokenizer = SlowBytes()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|turn|>"]})
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def _gpt2_bytes() -> dict[str, int]:
    """Map each character of the byte-level alphabet to its byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(others)}


GPT2_BYTES = _gpt2_bytes()
BYTE_EXACT = [byte_level, byte_level_across, slow_bytes]  # the whole decode is a function of the bytes alone
BYTE_FALLBACK = [metaspace_unigram, llama_bpe]
ALL = BYTE_EXACT + BYTE_FALLBACK
every_tokenizer = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
checked = settings(deadline=None, max_examples=100, derandomize=True)  # a new case is for a run with more examples
Make = Callable[[], PreTrainedTokenizerBase]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return tokenizer.convert_tokens_to_ids(token)


def as_bytes(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    """Return the byte-fallback tokens of some bytes."""
    return [id_of(tokenizer, f"<0x{b:02X}>") for b in data]


def deltas(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], prompt: Sequence[int] = (), skip: bool = True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


texts = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(TRICKY + LINES), max_size=5).map("".join))
specials = st.sampled_from(["<|end|>", "<|turn|>", "<tool>"])
mixed = st.lists(st.one_of(texts, specials), max_size=6).map("".join)


# --- detokenizing ---------------------------------------------------------------------------------------------------


@every_tokenizer
@checked
@given(text=mixed, skip=st.booleans())
def test_f1_f2_deltas_of_any_text_equal_the_whole_decode(make: Make, text: str, skip: bool):
    """f1 and f2: emoji, CJK, ZWJ, leading spaces, special and added tokens in the middle."""
    tokenizer = make()
    ids = encode(tokenizer, text)
    assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", BYTE_EXACT, ids=lambda make: make.__name__)
@checked
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_equal_the_whole_decode(make: Make, data: st.DataObject, skip: bool):
    """Also with invalid bytes, with tokens across characters, and with a special token inside a character."""
    tokenizer = make()
    ids = st.integers(0, len(tokenizer) - 1)
    runs = st.builds(lambda i, n: [i] * n, ids, st.integers(1, 40))
    tokens = sum(data.draw(st.lists(st.one_of(runs, st.lists(ids, max_size=30)), max_size=4)), [])
    assert "".join(deltas(tokenizer, tokens, skip=skip)) == tokenizer.decode(tokens, skip_special_tokens=skip)


@checked
@given(tail=st.lists(st.sampled_from([b"\x80\xf0", b"\x80\xf0\x9f", b"\x9f\x98", b"\x98\x80\xf0\x9f"]), max_size=80))
@example(tail=[b"\x9f\x98", b"\x80\xf0"] * 40)
def test_f1_no_token_ends_with_a_character(tail: list[bytes]):
    """Every token ends inside an emoji: the window is cut, the text is not."""
    tokenizer = byte_level_across()
    char_of = {b: c for c, b in GPT2_BYTES.items()}
    ids = [id_of(tokenizer, "".join(char_of[b] for b in piece)) for piece in [b"\xf0", *tail]]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@every_tokenizer
@pytest.mark.parametrize("text", [t for t in TRICKY + LINES if "�" not in t])
def test_f1_no_replacement_character_is_streamed(make: Make, text: str):
    """f1: an unfinished character is held back, and every finished one is out at once."""
    tokenizer = make()
    ids = encode(tokenizer, text)
    parts = deltas(tokenizer, ids)
    assert "�" not in "".join(parts)
    assert parts[-1] == ""
    for n in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:n])
        assert "".join(parts[:n]) == prefix.rstrip("�") or prefix.endswith("�")


def test_f1_an_emoji_comes_out_with_its_last_token():
    tokenizer = slow_bytes()
    assert deltas(tokenizer, encode(tokenizer, "a😀b")) == ["a", "", "", "", "😀", "b", ""]


@every_tokenizer
def test_f1_an_output_that_ends_inside_a_character_shows_it_as_the_whole_decode_does(make: Make):
    tokenizer = make()
    ids = encode(tokenizer, "a\n🏳")
    ids = next(ids[:n] for n in range(len(ids), 0, -1) if tokenizer.decode(ids[:n]).endswith("�"))
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert set(parts[-1]) == {"�"}


@every_tokenizer
@checked
@given(text=mixed, skip=st.booleans())
def test_what_is_asked_for_text_says_what_the_tokenizer_says(make: Make, text: str, skip: bool):
    tokenizer = make()
    ids = encode(tokenizer, text)
    want = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert decoder_of(tokenizer)(ids, skip) == want


def test_a_fast_tokenizer_makes_text_without_a_detour(monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_level()
    ids = encode(tokenizer, LINES[0])
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", None)
    assert "".join(deltas(tokenizer, ids)) == LINES[0]


def test_text_is_not_cleaned_up(monkeypatch: pytest.MonkeyPatch):
    """Not by a tokenizer whose own `decode` would."""
    tokenizer = metaspace_unigram()
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)
    ids = [id_of(tokenizer, "▁a"), *as_bytes(tokenizer, b" .")]
    assert [tokenizer.decode(ids), decoder_of(tokenizer)(ids, True)] == ["a.", "a ."]
    assert "".join(deltas(tokenizer, ids)) == "a ."


class Shouting(PreTrainedTokenizerFast):
    """A fast tokenizer with a text of its own."""

    def _decode(self, token_ids: list[int], **kwargs: object) -> str:
        return str(super()._decode(token_ids, **kwargs)).upper()


@pytest.mark.parametrize("how", ["its class", "itself"])
def test_a_tokenizer_that_has_its_own_decode_is_asked(how: str, monkeypatch: pytest.MonkeyPatch):
    fast = byte_level()
    tokenizer = (
        Shouting(tokenizer_object=fast.backend_tokenizer) if how == "its class" else wrap(fast.backend_tokenizer)
    )
    if how == "itself":
        monkeypatch.setattr(tokenizer, "decode", lambda ids, **kwargs: fast.decode(ids, **kwargs).upper())
    assert "".join(deltas(tokenizer, encode(tokenizer, "stop here"))) == "STOP HERE"


def test_finish_gives_the_rest_once():
    tokenizer = slow_bytes()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(0xE4) == ""
    assert [detokenizer.finish(), detokenizer.finish()] == ["�", ""]


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_f2_spaces_survive_skipped_special_tokens(make: Make):
    """f2: a skipped special token is no anchor for the next word's space, however many come."""
    tokenizer = make()
    a, end = id_of(tokenizer, "▁a"), id_of(tokenizer, "<|end|>")
    assert deltas(tokenizer, [a, *[end] * 50, a]) == ["a", *[""] * 50, " a", ""]


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_f2_spaces_survive_ids_that_are_no_tokens(make: Make):
    tokenizer = make()
    a, padding = id_of(tokenizer, "▁a"), len(tokenizer) + 5
    assert deltas(tokenizer, [a, padding, padding, a]) == ["a", "", "", " a", ""]


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_f1_a_prompt_of_split_characters_goes_on_in_the_output(make: Make):
    """f1: the last few prompt tokens that are read begin with a whole character."""
    tokenizer = make()
    for prompt in ("你" * 5, "é你你你", "😀😀😀"):
        assert (
            "".join(deltas(tokenizer, as_bytes(tokenizer, "好".encode()), as_bytes(tokenizer, prompt.encode()))) == "好"
        )


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_f2_with_a_prompt_the_first_word_keeps_its_space(make: Make):
    """f2: what follows a prompt can be put after it; without a prompt it is the decode of the output."""
    tokenizer = make()
    prompt, output = encode(tokenizer, "stop"), [id_of(tokenizer, "▁here")]
    assert "".join(deltas(tokenizer, output, prompt)) == " here"
    assert "".join(deltas(tokenizer, output)) == "here" == tokenizer.decode(output)


@every_tokenizer
@checked
@given(prompt=texts, text=texts)
def test_f2_with_a_prompt_the_deltas_are_what_the_whole_decode_adds(make: Make, prompt: str, text: str):
    tokenizer = make()
    before, ids = encode(tokenizer, prompt), encode(tokenizer, text)
    whole, start = tokenizer.decode(before + ids), tokenizer.decode(before)
    assert "".join(deltas(tokenizer, ids, before)) == whole.removeprefix(start)


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_a_prompt_cut_inside_a_character_does_not_leak_into_the_output(make: Make):
    tokenizer = make()
    cut = as_bytes(tokenizer, "你".encode())
    a = id_of(tokenizer, "▁a")
    assert "".join(deltas(tokenizer, [a], cut[:2])) == " a"
    assert "".join(deltas(tokenizer, [*cut[2:], a], cut[:2])) == "� a"


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_a_character_that_is_out_stands_when_its_byte_run_turns_invalid(make: Make):
    """The documented exception: the whole decode takes back 你, a stream can't."""
    tokenizer = make()
    ids = [*as_bytes(tokenizer, "你".encode() + b"\xff"), id_of(tokenizer, "b")]
    assert tokenizer.decode(ids) == "����b"
    assert deltas(tokenizer, ids) == ["", "", "你", "", "�b", ""]
    assert deltas(tokenizer, as_bytes(tokenizer, "你好".encode()[:-1])) == ["", "", "你", "", "", "��"]


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_a_byte_that_shows_nothing_is_not_taken_for_a_part_of_the_next_character(make: Make):
    """A leading space is dropped by the decoder; with the bytes behind it, it shows as one U+FFFD more."""
    tokenizer = make()
    ids = as_bytes(tokenizer, " 𐀀a 𐀀".encode())
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
@checked
@given(data=st.data())
def test_byte_fallback_loses_nothing_in_any_tokens(make: Make, data: st.DataObject):
    """Valid text comes out exactly; beside invalid bytes every other token still does."""
    tokenizer = make()
    pieces = st.one_of(
        st.sampled_from(["▁", "▁a", "a", "▁stop", "\n", "<|end|>"]).map(lambda piece: [id_of(tokenizer, piece)]),
        st.lists(st.sampled_from([0x80, 0xBD, 0xA0, 0xE4, 0xF0, 0xFF]), max_size=25).map(
            lambda data: as_bytes(tokenizer, bytes(data))
        ),
        texts.map(lambda text: as_bytes(tokenizer, text.encode())),
    )
    ids = sum(data.draw(st.lists(pieces, max_size=6)), [])
    whole, streamed = tokenizer.decode(ids, skip_special_tokens=True), "".join(deltas(tokenizer, ids))
    if "�" not in whole:
        assert streamed == whole
    tokens_without_bytes = [i for i in ids if not tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
    letters = tokenizer.decode(tokens_without_bytes, skip_special_tokens=True).replace(" ", "")
    remaining = iter(streamed)
    assert all(letter in remaining for letter in letters)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xffA", b"\xff\xe4\xbd\xa0"])
def test_invalid_bytes_are_neither_held_for_ever_nor_lost(make: Make, data: bytes):
    """At most three U+FFFD wait; one is shown for each that the whole decode has."""
    tokenizer = make()
    char_of = {b: c for c, b in GPT2_BYTES.items()}
    if make in BYTE_FALLBACK:
        ids = as_bytes(tokenizer, data * 10)
    else:
        ids = [b if make is slow_bytes else id_of(tokenizer, char_of[b]) for b in data * 10]
    detokenizer, out = IncrementalDetokenizer(tokenizer), ""
    for n, token in enumerate(ids, 1):
        out += detokenizer.push(token)
        assert len(out) >= len(tokenizer.decode(ids[:n])) - 3
    assert out + detokenizer.finish() == tokenizer.decode(ids) or (make in BYTE_FALLBACK and data[1:] != b"")


@pytest.mark.parametrize("num_invalid", range(8, 26))
def test_f1_a_character_after_many_invalid_bytes_comes_out_whole(num_invalid: int):
    """Wherever the window is cut."""
    tokenizer = slow_bytes()
    ids = [*b"\x80" * num_invalid, *"😀a".encode()]
    assert "".join(deltas(tokenizer, ids)) == "�" * num_invalid + "😀a"


@pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)
def test_a_long_invalid_run_of_byte_fallback_shows_each_byte_once(make: Make):
    """The window is cut inside the run: as U+FFFD like in the whole decode, or, past the cut, as the character."""
    tokenizer = make()
    ids = as_bytes(tokenizer, b"\xff" * 3 + "你".encode() * 20)
    assert "".join(deltas(tokenizer, ids)) == "�" * 63 == tokenizer.decode(ids)
    ids = as_bytes(tokenizer, b"\xff" + "😀".encode() * 20)
    assert "".join(deltas(tokenizer, ids)) == "�" * 17 + "😀" * 16


@every_tokenizer
@pytest.mark.parametrize("kind", ["text", "invalid", "special", "across"])
def test_no_decode_ever_sees_more_than_a_window(make: Make, kind: str):
    """A token costs a window, never the whole output."""
    tokenizer = make()
    ids = {
        "text": encode(tokenizer, "".join(LINES) * 3),
        "invalid": encode(tokenizer, "�a")[:1] * 400,
        "special": [id_of(tokenizer, "<|end|>")] * 400,
        "across": list(range(len(tokenizer) - 12, len(tokenizer))) * 40,
    }[kind]

    class Watched:
        longest = 0

        def decode(self, token_ids: list[int], **options: bool) -> str:
            self.longest = max(self.longest, len(token_ids))
            return tokenizer.decode(token_ids, **options)

    watched = Watched()
    assert "".join(deltas(watched, ids)) == tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[arg-type]
    assert watched.longest <= 34


def test_clean_up_is_off_because_it_would_rewrite_text_that_is_out():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=metaspace_unigram().backend_tokenizer, clean_up_tokenization_spaces=True
    )
    ids = [id_of(tokenizer, piece) for piece in ("a", "▁", ".")]
    assert tokenizer.decode(ids) == "a."
    assert deltas(tokenizer, ids) == ["a", " ", ".", ""]


# --- where an output ends -------------------------------------------------------------------------------------------


def run(checker: StopChecker, ids: Iterable[int]) -> tuple[int, str, Step]:
    """Push tokens up to the end: tokens kept, text streamed, last step."""
    streamed, step, count = "", Step(), 0
    for count, token in enumerate(ids, 1):  # noqa: B007 - returned
        step = checker.push(token)
        streamed += step.text
        assert checker.text == streamed
        if step.finish_reason:
            break
    return count, streamed, step


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode all; where byte fallback would take back finished characters for the unfinished one after them, don't."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if text.endswith("�") and tokenizer in [make() for make in BYTE_FALLBACK]:
        last = tokenizer.decode(ids[-1:], skip_special_tokens=True)  # "�", or "" if it is skipped
        return whole_text(tokenizer, ids[:-1]) + last
    return text


def naive(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], params: SamplingParams, eos: Iterable[int], limit: int | None
) -> tuple[int, str, Step] | None:
    """Where plain decoding ends: after each token, decode the whole prefix from scratch and look for stops."""
    most = min(params.max_new_tokens, params.max_new_tokens if limit is None else limit)
    for n, token in enumerate(ids, 1):
        if token in eos and not params.ignore_eos:
            return n, whole_text(tokenizer, ids[: n - 1]), Step(finish_reason="stop")
        if token in params.stop_token_ids:
            return n, whole_text(tokenizer, ids[: n - 1]), Step(finish_reason="stop", stop_reason=token)
        text = whole_text(tokenizer, ids[:n])
        found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in params.stop if stop in text]
        if found:
            _, start, stop = min(found)
            return n, text[:start], Step(finish_reason="stop", stop_reason=stop)
        if n >= most:
            return n, text, Step(finish_reason="length")
    return None


def same_end(got: tuple[int, str, Step], want: tuple[int, str, Step]) -> bool:
    """Compare all but the last step's own text."""
    return (
        got[:2] == want[:2]
        and got[2].finish_reason == want[2].finish_reason
        and (got[2].stop_reason == want[2].stop_reason)
    )


@every_tokenizer
@checked
@given(data=st.data())
def test_b1_b2_b3_f3_any_output_ends_where_a_naive_oracle_ends_it(make: Make, data: st.DataObject):
    """b1, b2, b3, f3: stops are substrings and tokens that the output really has, near misses among them."""
    tokenizer = make()
    ids = encode(tokenizer, data.draw(mixed.filter(lambda text: text and "�" not in text)))
    if not ids:
        return
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6), st.sampled_from(["", "x", "q"]))
    stops = data.draw(st.lists(cuts.map(lambda cut: whole[cut[0] : cut[0] + cut[1]] + cut[2]), max_size=3))
    one_of_them = st.lists(st.sampled_from(ids), max_size=1)
    params = SamplingParams(
        max_new_tokens=data.draw(st.integers(1, len(ids))),
        stop=[stop for stop in stops if stop],
        stop_token_ids=data.draw(one_of_them),
        ignore_eos=data.draw(st.booleans()),
    )
    eos, limit = data.draw(one_of_them), data.draw(st.none() | st.integers(1, len(ids)))
    want = naive(tokenizer, ids, params, eos, limit)
    assert want is not None
    assert same_end(run(StopChecker(params, frozenset(eos), tokenizer, limit=limit), ids), want)


@checked
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=2, max_size=7), min_size=1, max_size=4))
def test_f3_only_a_possible_stop_is_held_back(text: str, stops: list[str]):
    """f3: after each token exactly the longest end of the text that starts a stop string waits; nothing is lost."""
    tokenizer = slow_bytes()
    checker = StopChecker(SamplingParams(stop=stops), tokenizer=tokenizer)
    for n, char in enumerate(text, 1):
        if checker.push(ord(char)).finish_reason:
            return
        so_far = text[:n]
        waiting = max(k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert checker.text == so_far[: n - waiting]
    checker.flush()
    assert checker.text == text


def test_f3_text_that_starts_like_a_stop_is_released_once_it_cannot_be_one():
    tokenizer = slow_bytes()
    checker = StopChecker(SamplingParams(stop="<stop>"), tokenizer=tokenizer)
    assert [checker.push(ord(c)).text for c in "a<sto<stun"] == ["a", "", "", "", "", "<sto", "", "", "<stu", "n"]


def test_f3_what_is_held_comes_out_when_the_output_ends_by_length_or_eos():
    tokenizer = slow_bytes()
    ids = encode(tokenizer, "a<st")
    by_length = StopChecker(SamplingParams(stop="<stop>", max_new_tokens=4), tokenizer=tokenizer)
    assert run(by_length, ids) == (4, "a<st", Step("<st", "length"))
    by_eos = StopChecker(SamplingParams(stop="<stop>"), {7}, tokenizer)
    assert run(by_eos, [*ids, 7]) == (5, "a<st", Step("<st", "stop"))


@pytest.mark.parametrize("eos", [[256], [257], [256, 257]])
def test_b1_the_first_eos_of_a_list_ends_the_output_and_is_not_in_its_text(eos: list[int]):
    """b1: special tokens 256 and 257 and, skipped or not, neither shows."""
    tokenizer = slow_bytes()
    ids = [*encode(tokenizer, "ab"), 256, *encode(tokenizer, "cd"), 257, *encode(tokenizer, "ef")]
    for skip in (True, False):
        checker = StopChecker(SamplingParams(skip_special_tokens=skip), frozenset(eos), tokenizer)
        count, text, step = run(checker, ids)
        assert (count, step.finish_reason, step.stop_reason) == (ids.index(eos[0]) + 1, "stop", None)
        assert text == tokenizer.decode(ids[: count - 1], skip_special_tokens=skip)


def test_b1_an_eos_that_is_a_plain_token_is_not_in_the_text_either():
    checker = StopChecker(SamplingParams(), {ord("!")}, slow_bytes())
    assert run(checker, b"ab!cd") == (3, "ab", Step("", "stop"))


def test_b1_ignore_eos_goes_on_but_a_stop_token_still_ends():
    tokenizer = slow_bytes()
    checker = StopChecker(SamplingParams(ignore_eos=True, stop_token_ids=[ord("c")]), {ord("a")}, tokenizer)
    assert run(checker, b"abcd") == (3, "ab", Step("", "stop", ord("c")))


@pytest.mark.parametrize("budget", range(1, 8))
def test_b2_max_new_tokens_ends_inside_a_block_at_the_exact_length(budget: int):
    checker = StopChecker(SamplingParams(max_new_tokens=budget), tokenizer=slow_bytes())
    assert run(checker, b"abcdefgh")[:2] == (budget, "abcdefgh"[:budget])
    assert checker.text == "abcdefgh"[:budget]


def test_b2_the_context_limit_ends_it_too():
    checker = StopChecker(SamplingParams(max_new_tokens=9), tokenizer=slow_bytes(), limit=3)
    assert run(checker, b"abcdefgh") == (3, "abc", Step("c", "length"))


def test_b2_an_unfinished_character_at_the_length_limit_is_flushed():
    checker = StopChecker(SamplingParams(max_new_tokens=3), tokenizer=slow_bytes())
    assert run(checker, "a😀".encode()) == (3, "a�", Step("�", "length"))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_new_tokens=3, stop="bc"), "bc"),
        (SamplingParams(max_new_tokens=3, stop_token_ids=[ord("c")]), ord("c")),
    ],
)
def test_b2_a_stop_wins_over_the_length_on_the_same_token(params: SamplingParams, reason: int | str):
    count, text, step = run(StopChecker(params, tokenizer=slow_bytes()), b"abcd")
    assert (count, step.finish_reason, step.stop_reason) == (3, "stop", reason)
    assert text == "abc".removesuffix(reason if isinstance(reason, str) else chr(reason))


@pytest.mark.parametrize("make", [byte_level, llama_bpe, slow_bytes], ids=lambda make: make.__name__)
@pytest.mark.parametrize("stop", ["s", "st", "stop", "stop a", "op", " a", "p a.", "你", "a.你"])
def test_b3_a_stop_string_over_several_tokens_or_inside_one(make: Make, stop: str):
    """b3: the token that completes it is the last; what follows in that token is dropped."""
    tokenizer = make()
    ids = encode(tokenizer, "a stop a.你好")
    params = SamplingParams(stop=stop)
    want = naive(tokenizer, ids, params, (), None)
    assert want is not None
    assert want[1] == "a stop a.你好".partition(stop)[0]
    assert same_end(run(StopChecker(params, tokenizer=tokenizer), ids), want)


def test_b3_the_stop_string_that_ends_first_cuts_the_text():
    """Not the first in the list, nor the first to start; the longest, where two end together."""
    tokenizer = slow_bytes()
    for stops in (["bcde", "cd", "d"], ["d", "cd", "bcde"]):
        checker = StopChecker(SamplingParams(stop=stops), tokenizer=tokenizer)
        assert run(checker, b"abcdef") == (4, "a" + "b", Step("b", "stop", "cd"))


def test_b3_a_stop_inside_a_skipped_or_ended_token_is_no_stop():
    """Stop strings are looked for in the text, which neither skipped tokens nor an EOS are part of."""
    tokenizer = slow_bytes()
    checker = StopChecker(SamplingParams(stop="end"), {257}, tokenizer)
    assert run(checker, [ord("a"), 256, ord("b"), 257]) == (4, "ab", Step("", "stop"))


def test_b3_a_stop_string_completed_by_the_last_flush_still_counts():
    checker = StopChecker(SamplingParams(stop="�", max_new_tokens=2), tokenizer=slow_bytes())
    assert run(checker, b"a\xff") == (2, "a", Step("", "stop", "�"))


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidRequest, match=r"stop strings need a tokenizer; stop is \['x'\]"):
        StopChecker(SamplingParams(stop="x"))


def test_token_only_use_has_stops_and_lengths_but_no_text():
    assert run(StopChecker(SamplingParams(), {5}), [1, 2, 5, 3]) == (3, "", Step("", "stop"))
    assert run(StopChecker(SamplingParams(max_new_tokens=2)), [1, 2, 5]) == (2, "", Step("", "length"))


def test_flush_gives_an_aborted_request_its_held_text_once():
    checker = StopChecker(SamplingParams(stop="bcd"), tokenizer=slow_bytes())
    assert [checker.push(token).text for token in b"abc\xe4"] == ["a", "", "", ""]
    assert [checker.flush(), checker.flush(), checker.text] == ["bc�", "", "abc�"]


def test_nothing_may_follow_the_end():
    checker = StopChecker(SamplingParams(max_new_tokens=1))
    checker.push(1)
    with pytest.raises(AssertionError, match="has ended"):
        checker.push(2)


def test_a_stop_string_longer_than_the_output_is_lost_on_nobody():
    checker = StopChecker(SamplingParams(stop="a" * 20_000 + "b", max_new_tokens=1_000), tokenizer=slow_bytes())
    count, text, step = run(checker, b"a" * 2_000)
    assert (count, text, step.finish_reason) == (1_000, "a" * 1_000, "length")
