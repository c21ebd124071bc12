"""A small real tokenizer for tiny models."""

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

CHAT = "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}"
CHAT += "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def letters(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """95 printable characters, one token each, and <eos> as id 95."""
    vocab = {chr(c) if c != 32 else "Ġ": c - 32 for c in range(32, 127)} | {"<eos>": 95}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = token_decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = chat_template
    return tokenizer
