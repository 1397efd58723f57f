"""TFRecord files are read without TensorFlow, and their checksums are believed."""

import pytest

from fakes.source_files import message_of, problems_of, records_of, rows_of
from fakes.tf_examples import example, framed, tfrecord_file
from pliant.data.sources import tfrecords
from pliant.data.sources.crc32c import crc32c


def test_the_checksum_is_the_published_one():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


def test_features_become_columns(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(
        tfrecord_file(
            [
                {"text": "naïve", "input_ids": [1, -2, 2**40], "score": [0.5]},
                {"text": ["a", "b"], "input_ids": [7], "image": b"\xff\xd8"},
            ]
        )
    )
    assert records_of(path, max_records=1) == [
        {"text": "naïve", "input_ids": [1, -2, 2**40], "score": [0.5]},
        {"text": ["a", "b"], "input_ids": [7], "image": b"\xff\xd8"},
    ]


def test_damaged_data_is_a_bad_row_between_good_ones(tmp_path):
    path = tmp_path / "a.tfrecord"
    good = tfrecord_file([{"text": "good"}])
    bad = bytearray(tfrecord_file([{"text": "evil"}]))
    bad[bad.index(b"evil")] ^= 1
    path.write_bytes(good + bytes(bad) + framed(b"\xff\xff") + good)
    first, damaged, no_example, last = problems_of(path)
    assert (first, last) == (None, None)
    assert "a.tfrecord record 2 is damaged: its CRC-32C" in damaged
    assert "a.tfrecord record 3 is no tf.train.Example" in no_example
    assert rows_of(path)[0][2].raw == b"\xff\xff"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "ends within the record at byte 0"),
        (lambda data: data[:7], "ends within the record at byte 0"),
        (lambda data: b"\x01" + data[1:], "has no whole record at byte 0: the checksum"),
        (lambda data: data + b"{}" * 10, "has no whole record at byte 35"),
    ],
)
def test_what_hides_the_records_after_it_is_an_error(tmp_path, damage, problem):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(damage(framed(example({"text": "x" * 3}))))
    message = message_of(path)
    assert "a.tfrecord" in message
    assert problem in message


def test_an_empty_file_holds_no_records(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"")
    assert rows_of(tmp_path / "a.tfrecord") == []


def test_a_record_beyond_the_limit_is_refused_before_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(tfrecord_file([{"text": "x" * 100}]))
    assert "and 100 are the most that is read at once" in message_of(path)
