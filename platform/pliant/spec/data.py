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


class SourceSpec(Section):
    """One part of a mixture."""

    path: str
    """A file, a glob, a directory or a URI."""
    weight: Float = Field(1.0, gt=0)
    """Its share of an epoch, beside the other parts' weights."""


Overlong = Literal["auto", "split", "truncate", "drop", "error"]
Sources = str | list[str] | list[str | SourceSpec]


def paths_of(sources: Sources) -> list[str]:
    """What the sources name, in their order."""
    listed = [sources] if isinstance(sources, str) else sources
    return [one if isinstance(one, str) else one.path for one in listed]


class DataSpec(Section):
    """From files to packed rows of `seq_len` tokens."""

    train: str | Annotated[list[str | SourceSpec], Field(min_length=1)]
    """A file, a glob, a directory or a URI (`s3://bucket/prefix`), or several; `stdlib://` is the
    documentation of the Python standard library of this installation. Where any of them is
    {path, weight}, an epoch is a mixture with these shares; one without a weight has 1."""
    mixture_by: Literal["samples", "tokens"] = "samples"
    """What the weights of a mixture are shares of. An epoch is as large as all data together: a
    part of a small share is not seen whole in it, and goes on in the next one."""
    validation: str | list[str] | None = None
    """Files of the validation set; without them `split` holds some of `train` out."""
    test: str | list[str] | None = None
    """Files of the test set, evaluated once at the end."""
    split: SplitSpec = SplitSpec()
    format: Literal[
        "auto",
        "jsonl",
        "json",
        "parquet",
        "arrow",
        "csv",
        "tsv",
        "text",
        "tfrecord",
        "hdf5",
    ] = "auto"
    """"auto" goes by the file's ending; .gz or .zst may follow it."""
    text_unit: Literal["line", "paragraph", "file"] = "paragraph"
    """What one sample is in plain text: paragraphs are parted by blank lines."""
    shape: Literal[
        "auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages", "input_ids"
    ] = "auto"
    """What a record looks like; "auto" goes by its columns."""
    columns: dict[str, str] = {}
    """Which column of the file holds which field, for example {prompt: question}."""
    chat_template: str = "tokenizer"
    """How chats become text: "tokenizer" for its own template (ChatML where it has none), chatml,
    llama3, qwen3, gemma, mistral, or the path of a .jinja file."""
    train_on: Literal["all", "assistant", "last_assistant", "completion"] = "assistant"
    """Which tokens carry loss: all of them, answers only ("completion" says the same), or the last
    answer of a chat only. Plain text always trains on all."""
    tokenizer: TokenizerSpec
    transform: str | None = None
    """Dotted path of a function `(record: dict) -> dict | None`, applied to each raw record; None
    drops it."""
    seq_len: Int = Field(gt=1, le=16_777_216)
    """Tokens per packed row."""
    packing: bool = True
    """Off: one sample a row, padded."""
    eval_packing: Literal["auto"] | bool = "auto"
    """The same for validation and test rows; "auto" is as packing."""
    window: Int = Field(1000, gt=0)
    """Samples that are packed together, best fit first, after shuffling."""
    overlong: Overlong = "auto"
    """What happens to a sample longer than seq_len; "auto" splits text and truncates what holds
    questions and answers, so that no answer is trained without its question."""
    bad_rows: Literal["error", "skip"] = "error"
    """What happens to a record that cannot be used. Those skipped are counted, and kept in
    KEY.quarantine beside the store, with the reason."""
    max_untrained: Float = Field(0.5, ge=0, le=1)
    """Share of the samples that may have nothing to train on, such as chats without an answer. More
    of them is an error: masks are wrong then, more often than not."""
    max_bad_rows: Int = Field(1000, gt=0)
    """More of them than that end the preparation in any case."""
    shard_samples: Int = Field(65536, gt=0)
    """Samples per shard of the prepared store."""
    block_steps: IntOrAuto = "auto"
    """Steps per block that Ray Data reads; "auto" aims at 4 MiB."""
    store: str | None = None
    """Where prepared data is kept: a directory, or a URI such as `s3://bucket/stores`, of which
    each machine keeps what it reads in a cache. By default `stores/` in the runs directory."""
    store_cache_gib: Float = Field(64.0, gt=0)
    """How large that cache may grow; what was not read for the longest goes first."""
