"""A tokenizer is trained the same every time, kept with the store, and read from foreign files."""

import json

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pliant.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    open_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from pliant.errors import DataError

TEXTS = ["the cat sat on the mat", "细胞理论和日心说", "<|im_start|>user\nhello<|im_end|>"] * 20
MIXED = "细胞 the\tcat 🎈 <|im_start|>x<|im_end|> \u2028 naïve"


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300)


def test_training_twice_gives_the_same_tokenizer(trained):
    assert train_tokenizer(iter(TEXTS), 300).digest == trained.digest
    assert train_tokenizer(TEXTS, 290).digest != trained.digest


def test_every_text_survives(trained):
    [ids] = trained.encode_batch([MIXED])
    assert trained.decode(ids) == MIXED
    assert max(ids) < trained.vocab_size


def test_markers_are_single_tokens_and_nothing_is_added(trained):
    ids = trained.encode_batch(["<|im_start|>", "<|im_end|>", "<|endoftext|>", ""])
    assert [len(row) for row in ids] == [1, 1, 1, 0]
    assert ids[2] == [trained.eos_id]


def test_a_saved_tokenizer_loads_here_and_in_transformers(trained, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(trained, tmp_path / "tokenizer")
    assert open_tokenizer(tmp_path / "tokenizer").digest == trained.digest
    foreign = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert foreign(MIXED, add_special_tokens=False)["input_ids"] == trained.encode_batch([MIXED])[0]
    assert (foreign.eos_token_id, foreign.pad_token_id) == (trained.eos_id, trained.pad_id)
    assert len(foreign) == trained.vocab_size


def test_a_directory_and_a_bare_file_load_alike(trained, tmp_path):
    save_tokenizer(trained, tmp_path / "whole")
    trained.backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path / "whole", tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.eos_id == trained.eos_id
        assert loaded.encode_batch([MIXED]) == trained.encode_batch([MIXED])


def test_padding_and_truncation_of_a_foreign_file_are_off(trained, tmp_path):
    backend = tokenizers.Tokenizer.from_str(trained.backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode_batch([MIXED]) == (
        trained.encode_batch([MIXED])
    )


def test_a_gguf_file_holds_a_tokenizer_and_its_chat_template(trained, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, trained.backend)
    loaded = load_tokenizer(path)
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.eos_id == trained.eos_id
    assert loaded.decode(loaded.encode_batch(["the cat 细胞"])[0]) == "the cat 细胞"


def write_gguf(path, backend):
    """A file as llama.cpp writes it, with a byte-level BPE and no weights."""
    vocab = backend.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(backend.token_to_id("<|endoftext|>"))
    writer.add_pad_token_id(backend.token_to_id("<|endoftext|>"))
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_chat_template_and_the_special_tokens_are_kept(trained, tmp_path):
    save_tokenizer(trained, tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ bos_token }}细")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|im_start|>"
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path / "a")
    assert loaded.chat_template == "{{ bos_token }}细"
    assert loaded.special_tokens["bos_token"] == "<|im_start|>"
    save_tokenizer(loaded, tmp_path / "b")
    again = open_tokenizer(tmp_path / "b")
    assert again.digest == loaded.digest
    assert again.chat_template == loaded.chat_template
    assert again.special_tokens == loaded.special_tokens
    assert load_tokenizer(tmp_path / "b").chat_template == loaded.chat_template


def test_of_several_chat_templates_the_default_one_is_taken(trained, tmp_path):
    save_tokenizer(trained, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    several = [{"name": name, "template": name[0]} for name in ("tool_use", "default")]
    file.write_text(json.dumps(config | {"chat_template": several}))
    assert load_tokenizer(tmp_path).chat_template == "d"
    file.write_text(json.dumps(config | {"chat_template": several[:1]}))
    with pytest.raises(DataError, match="templates tool_use, and none is called default"):
        load_tokenizer(tmp_path)


PIECES = ["▁", "a", "b", "▁a", "▁b", "\n", "</s>", ":", "▁:"]


def with_spaces(**parts):
    """A tokenizer that begins a text with a space of its own."""
    scored = [(piece, -float(len(PIECES) - len(piece))) for piece in PIECES]
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0))
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, PIECES.index("</s>"), 0)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        },
    ],
)
def test_text_that_goes_on_gets_no_space_of_its_own(parts):
    tokenizer = with_spaces(**parts)
    [whole] = tokenizer.encode_batch(["a:b a"])
    first, second, third = tokenizer.encode_batch(["a:", "b", " a"], [False, True, True])
    assert first + second + third == whole
    assert tokenizer.encode_batch(["b"]) != [second]


def test_text_that_goes_on_is_as_any_other_to_most_tokenizers(trained):
    texts = ["the cat", "\nsat", " on"]
    assert trained.encode_batch(texts, [False, True, True]) == trained.encode_batch(texts)


def test_what_cannot_be_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no tokenizer"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded as a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="names no end of text"):
        load_tokenizer(tmp_path / "tokenizer.json")
