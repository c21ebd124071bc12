"""Turn a GGUF file into an ordinary Hugging Face folder in bf16: safetensors, config, tokenizer with chat template.

transformers reads the GGUF; what it leaves out or carries along from there is put right here.
"""

import contextlib
import errno
import io
import shutil
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import DownloadError
from specdec.hub.known import KnownModel
from specdec.hub.progress import Steps
from specdec.hub.quiet import quiet

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# One conversion at a time in a process: it redirects stderr and patches `gguf` while it runs.
_CONVERTING = threading.Lock()


def convert(gguf: Path, folder: Path, model: KnownModel, steps: Steps) -> None:
    """Write the Hugging Face folder of a GGUF file.

    Args:
        gguf: the weights file.
        folder: where to write; made here.
        model: the record that says which tokens end a text.
        steps: where progress is shown.

    Raises:
        DownloadError: the file can't be converted with the installed transformers.
        OSError: the folder can't be written.
    """
    folder.mkdir()
    with steps.step("convert to bf16 safetensors"), _CONVERTING:
        try:
            with quiet(), warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
                with _read_gguf_once():
                    tokenizer = _tokenizer(gguf, model)
                    _save(_weights(gguf), tokenizer, model, folder)
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if "No space left" in str(error):  # safetensors has its own exception for it
                raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
            raise DownloadError(_explain(model, error)) from error


def _explain(model: KnownModel, error: Exception) -> str:
    from transformers import __version__

    reason = f"{type(error).__name__}: {error}"
    return (
        f"{model.title} can't be converted with transformers {__version__}; specdec works with 5.17 or later ({reason})"
    )


@contextlib.contextmanager
def _read_gguf_once() -> Iterator[None]:
    """Let transformers parse the file once, not three times, and build its table of tensor names once, not 397 times.

    A file's 98,000 vocabulary strings take gguf's own reader 6 s, half of it for making each slice a new memmap; the
    tables take 5 s.
    """
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(PlainReader), cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _tokenizer(gguf: Path, model: KnownModel) -> "PreTrainedTokenizerBase":
    """Return the GGUF's tokenizer with the steps and settings that the conversion drops."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    template = None
    if model.tokenizer == "gemma":
        core, settings = _gemma_tokenizer(gguf), {"bos_token": "<bos>", "unk_token": "<unk>", "padding_side": "left"}
    else:
        read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        core, template = read.backend_tokenizer, read.chat_template
        settings = {"bos_token": read.bos_token, "unk_token": read.unk_token}
    if model.tokenizer == "smollm":
        _set_smollm_steps(core)
    # A new object: the one that was read would save where it was read from.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=model.eos_tokens[0],
        pad_token=model.pad_token,
        clean_up_tokenization_spaces=False,
        **settings,
    )
    tokenizer.chat_template = template
    return tokenizer


def _gemma_tokenizer(gguf: Path) -> "Tokenizer":
    from gguf import GGUFReader

    from specdec.hub import gemma_tokenizer

    fields = GGUFReader(str(gguf)).fields  # a str, as transformers asks for it: read once
    return gemma_tokenizer.build(
        fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    )


def _set_smollm_steps(core: "Tokenizer") -> None:
    """Give a byte-level BPE the steps around it that it was trained with; converters differ in all of them."""
    from tokenizers import decoders, pre_tokenizers, processors

    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")  # adds nothing
    core.decoder = decoders.ByteLevel()
    core.model.unk_token, core.model.fuse_unk, core.model.byte_fallback = None, False, False


def _weights(gguf: Path) -> "PreTrainedModel":
    """Return the GGUF's model in bf16, freed of all marks of its origin, which would forbid to save it."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    state = {name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()}
    config = _clean_config(read.config)
    return type(read).from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16)


def _clean_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Return a new config of the same settings; numbers that GGUF keeps in fp32 get their short form (1e-05) back."""
    import numpy as np

    def short(value: Any) -> Any:
        return float(str(np.float32(value))) if isinstance(value, float) else value

    foreign = ("quantization_config", "model_type", "dtype")
    settings = {
        key: short(value)
        for key, value in config.to_diff_dict().items()
        if key not in foreign and not key.startswith("_")
    }
    return type(config)(**settings)


def _save(weights: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", model: KnownModel, folder: Path) -> None:
    """Write weights, config, generation config and tokenizer, with the special tokens the same in all of them."""
    from transformers import GenerationConfig

    eos = tokenizer.convert_tokens_to_ids(list(model.eos_tokens))
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else eos[0],
        "pad_token_id": tokenizer.pad_token_id,
    }
    weights.config.update(special)
    weights.generation_config = GenerationConfig(**special)
    tokenizer.model_max_length = weights.config.max_position_embeddings
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors makes files that only their owner can read
