"""The data to train on: `data:` of a job spec."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pliant.spec.base import Float, Int, IntOrAuto, Section


class TokenizerSpec(Section):
    """Either a saved tokenizer, or one trained on the data itself."""

    path: str | None = None
    """A Hugging Face tokenizer directory, a `tokenizer.json`, or a `.gguf` file."""
    train_vocab_size: Int | None = Field(None, gt=256)
    """Train a byte-level BPE of this size on the training data; saved and hashed in the store."""

    @model_validator(mode="after")
    def _one_origin(self) -> "TokenizerSpec":
        if (self.path is None) == (self.train_vocab_size is None):
            raise ValueError(
                "needs exactly one of path and train_vocab_size. Use path for a saved tokenizer"
            )
        return self


class SplitSpec(Section):
    """Shares held out of `train`, chosen by a hash of each record's content, so that a record stays
    on its side whatever is added to the data."""

    validation: Float = Field(0.05, ge=0, lt=1)
    """Share of the records that is evaluated on during training."""
    test: Float = Field(0.0, ge=0, lt=1)
    """Share of the records that is evaluated on once, at the end."""

    @model_validator(mode="after")
    def _leaves_training_data(self) -> "SplitSpec":
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation {self.validation} + test {self.test} leaves nothing to train on. "
                "Their sum must stay below 1"
            )
        return self


class DataSpec(Section):
    """From files to packed rows of `seq_len` tokens."""

    train: str | Annotated[list[str], Field(min_length=1)]
    """A file, a glob, a directory, or several; `stdlib://` is the documentation of the Python
    standard library of this installation."""
    validation: str | list[str] | None = None
    """Files of the validation set; without them `split` holds some of `train` out."""
    test: str | list[str] | None = None
    """Files of the test set, evaluated once at the end."""
    split: SplitSpec = SplitSpec()
    format: Literal["auto", "jsonl", "json", "parquet", "text"] = "auto"
    """"auto" goes by the file's ending."""
    text_unit: Literal["line", "paragraph", "file"] = "paragraph"
    """What one sample is in plain text: paragraphs are parted by blank lines."""
    shape: Literal["auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages"] = "auto"
    """What a record looks like; "auto" goes by its columns."""
    columns: dict[str, str] = {}
    """Which column of the file holds which field, for example {prompt: question}."""
    train_on: Literal["all", "completion"] = "completion"
    """Which tokens carry loss: all of them, or answers only. Plain text always trains on all."""
    tokenizer: TokenizerSpec
    transform: str | None = None
    """Dotted path of a function `(record: dict) -> dict | None`, applied to each raw record; None
    drops it."""
    seq_len: Int = Field(gt=1, le=16_777_216)
    """Tokens per packed row."""
    packing: bool = True
    """Off: one sample a row, padded."""
    window: Int = Field(1000, gt=0)
    """Samples that are packed together, best fit first, after shuffling."""
    overlong: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to a sample longer than seq_len."""
    shard_samples: Int = Field(65536, gt=0)
    """Samples per shard of the prepared store."""
    block_steps: IntOrAuto = "auto"
    """Steps per block that Ray Data reads; "auto" aims at 4 MiB."""
    store: str | None = None
    """Where prepared data is kept; by default `stores/` in the runs directory."""
