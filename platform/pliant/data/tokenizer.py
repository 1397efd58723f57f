"""The tokenizer of a job: loaded from a file, or trained on the data, and kept with the store.

Preparation and workers load it from the store with `tokenizers` alone; transformers, which takes
seconds to import, is needed only to read what other people saved.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pliant.data.chatml import TURN_END, TURN_START
from pliant.errors import DataError

TRAINING_BYTES = 64 * 2**20
"""Of text that a tokenizer is trained on; more hardly changes it."""
END_OF_TEXT = "<|endoftext|>"
SPECIAL = [END_OF_TEXT, TURN_START, TURN_END]
KNOWN_ENDS = [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", TURN_END]
"""Tried in turn where a `tokenizer.json` comes without a config that names its end of text."""

MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
IDS_FILE = "pliant.json"
TEMPLATE_FILE = "chat_template.jinja"

ANCHOR = "\n"
"""Stands before text that goes on, where a tokenizer would begin it like a text of its own."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    backend: Any
    """A `tokenizers.Tokenizer`, which neither pads nor truncates."""
    eos_id: int
    pad_id: int
    chat_template: str | None = None
    """The Jinja template that came with it."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By the names under which templates know them: "bos_token" and so on."""

    @cached_property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: one more than the largest id, added tokens included."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides which ids a text has."""
        content = json.dumps([self.backend.to_str(), self.eos_id, self.pad_id])
        return hashlib.sha256(content.encode()).hexdigest()

    def encode_batch(
        self, texts: list[str], follows: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """The ids of each text; nothing is added to them.

        `follows` says which texts go on from the one before. It matters to tokenizers that begin
        every text with a space of their own.
        """
        if follows is None or not self._begins_with_space:
            return self._encode(texts)
        anchor = self._encode([ANCHOR])[0]
        pairs = list(zip(texts, follows, strict=True))
        anchored = self._encode([ANCHOR + text if later else text for text, later in pairs])
        for i, (ids, later) in enumerate(zip(anchored, follows, strict=True)):
            if later and ids[: len(anchor)] == anchor:
                anchored[i] = ids[len(anchor) :]
            elif later:  # the anchor melted into the text
                anchored[i] = self._encode([texts[i]])[0]
        return anchored

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether a letter has other tokens at the beginning of a text than after a newline."""
        alone, newline, after = self._encode(["a", ANCHOR, ANCHOR + "a"])
        return after != newline + alone

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer that was saved: a Hugging Face directory, a `tokenizer.json` or a `.gguf` file.

    Raises `DataError` where it cannot be used.
    """
    if not path.exists():
        raise DataError(
            f"There is no tokenizer {path}. data.tokenizer.path names a Hugging Face directory, a "
            "tokenizer.json or a .gguf file.",
            path=path,
        )
    return _checked(_load_hugging_face(path), path)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, the same for the same texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_training_texts(texts), trainer)
    end = SPECIAL.index(END_OF_TEXT)  # special tokens come first
    return Tokenizer(backend, eos_id=end, pad_id=end)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write it for `open_tokenizer`, and so that transformers' `AutoTokenizer` loads it too."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.backend.id_to_token(tokenizer.eos_id),
        "pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id),
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    ids = {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    tokenizer.backend.save(str(directory / MODEL_FILE))
    for name, content in ((CONFIG_FILE, config), (IDS_FILE, ids)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if tokenizer.chat_template:
        (directory / TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote."""
    names = (IDS_FILE, CONFIG_FILE)
    ids, config = (json.loads((directory / name).read_text(encoding="utf-8")) for name in names)
    template = directory / TEMPLATE_FILE
    return Tokenizer(
        tokenizers.Tokenizer.from_file(str(directory / MODEL_FILE)),
        **ids,
        chat_template=template.read_text(encoding="utf-8") if template.exists() else None,
        special_tokens={key: text for key, text in config.items() if key.endswith("_token")},
    )


def _load_hugging_face(path: Path) -> Any:
    # Imported here: it takes seconds, and preparation with a trained tokenizer never needs it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        if (path.parent / CONFIG_FILE).exists():
            return AutoTokenizer.from_pretrained(str(path.parent), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # whatever a foreign file makes a foreign reader raise
        raise DataError(
            f"{path} cannot be loaded as a tokenizer: {str(error).splitlines()[0] or error!r}. "
            "data.tokenizer.path names a Hugging Face directory, a tokenizer.json or a .gguf file.",
            path=path,
        ) from error


def _checked(loaded: Any, path: Path) -> Tokenizer:
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"{path} holds a tokenizer without a fast version ({type(loaded).__name__}). Save it "
            "as a tokenizer.json.",
            path=path,
        )
    backend.no_truncation()
    backend.no_padding()
    eos_id = loaded.eos_token_id
    if eos_id is None:
        known = (backend.token_to_id(token) for token in KNOWN_ENDS)
        eos_id = next((token_id for token_id in known if token_id is not None), None)
    if eos_id is None:
        raise DataError(
            f"The tokenizer {path} names no end of text (eos_token), which ends every sample. Set "
            f"eos_token in its {CONFIG_FILE}.",
            path=path,
        )
    return Tokenizer(
        backend,
        eos_id,
        eos_id if loaded.pad_token_id is None else loaded.pad_token_id,
        _template_of(loaded, path),
        {"eos_token": backend.id_to_token(eos_id), **loaded.special_tokens_map},
    )


def _template_of(loaded: Any, path: Path) -> str | None:
    """Of several, the one for plain chats."""
    own = loaded.chat_template
    if not isinstance(own, dict):
        return own or None
    if "default" not in own:
        raise DataError(
            f"The tokenizer {path} has the chat templates {', '.join(own)}, and none is called "
            "default. Save the one to use as a file and name it in data.chat_template.",
            path=path,
        )
    return str(own["default"])


def _training_texts(texts: Iterable[str]) -> Iterator[str]:
    """The first `TRAINING_BYTES` of text, without the markers, which are tokens already."""
    left = TRAINING_BYTES
    for text in texts:
        for marker in SPECIAL:
            text = text.replace(marker, "")
        yield text
        left -= len(text.encode())
        if left <= 0:
            return
