"""What is said of a data set's lengths."""

import numpy as np
import pytest

from pliant.data import statistics
from pliant.data.statistics import Filling, drift, filling, histogram, propose_seq_len, quantiles


def lengths_of(*values):
    return np.array(values, dtype=np.int32)


def log_normal(mean, count=20_000, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean), 0.8, count)
    return np.maximum(drawn, 1).astype(np.int32)


def test_a_histogram_counts_every_length_once():
    found = histogram(lengths_of(5, 6, 7, 8, 11, 12, 100))
    assert found.edges == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert found.counts == (1, 2, 2, 1, 0, 0, 0, 0, 0, 1)
    assert histogram(lengths_of(1, 1)).counts == (2, 0, 0)
    assert sum(histogram(log_normal(300)).counts) == 20_000


def test_quantiles_are_lengths_that_there_are():
    found = quantiles(np.arange(1, 101, dtype=np.int32))
    assert found == {0.0: 1, 0.25: 25, 0.5: 50, 0.75: 75, 0.9: 90, 0.95: 95, 0.99: 99, 1.0: 100}


def test_filling_counts_what_does_not_fit():
    lengths = lengths_of(4, 2, 3, 1)
    split = filling(lengths, 3, window=10, splits=True)
    assert split == Filling(3, 10 / 12, 10 / 15, 4, 1, 1, 4)
    truncated = filling(lengths, 3, window=10, splits=False)
    assert truncated == Filling(3, 1.0, 9 / 12, 3, 1, 1, 4)


def test_large_data_sets_are_judged_by_a_part_of_them(monkeypatch):
    lengths = log_normal(355)
    whole = filling(lengths, 2048, window=1000, splits=True)
    monkeypatch.setattr(statistics, "MOST_PACKED", 5000)
    part = filling(lengths, 2048, window=1000, splits=True)
    assert part.packed == pytest.approx(whole.packed, abs=0.01)
    assert part.num_rows == pytest.approx(whole.num_rows, rel=0.05)
    assert (part.overlong, part.tokens_beyond) == (whole.overlong, whole.tokens_beyond)


def test_drift_tells_the_same_from_another_distribution():
    same = drift(log_normal(300), log_normal(300, seed=1))
    assert same.stability_index < 0.01
    assert same.verdict == "as before"
    longer = drift(log_normal(300), log_normal(600, seed=1))
    assert longer.verdict == "another distribution"
    assert longer.mean_ratio == pytest.approx(2.0, rel=0.05)
    assert drift(log_normal(300), log_normal(420, seed=1)).verdict == "shifted"
    constant = drift(np.full(100, 7, dtype=np.int32), np.full(50, 7, dtype=np.int32))
    assert constant.stability_index == pytest.approx(0.0, abs=1e-2)


def test_the_proposed_row_is_the_shortest_that_cuts_hardly_anything():
    lengths = log_normal(300)
    sizes = (256, 512, 1024, 2048, 4096, 8192)
    found = [filling(lengths, size, window=1000, splits=True) for size in sizes]
    proposed = propose_seq_len(found)
    assert lengths[lengths > proposed].sum() <= 0.01 * lengths.sum()
    assert lengths[lengths > proposed // 2].sum() > 0.01 * lengths.sum()
    assert propose_seq_len(found[:2]) == 512  # neither is good
