"""Which cards are fit for use, and how they are asked."""

import pytest

from fakes.cards import SOUND, FakeCards, FakeNvml
from pliant.elastic.health import (
    CardReading,
    CheckCards,
    NoCards,
    NvmlCards,
    is_visible,
    open_cards,
)

HOT = {"temperature_c": 91}
BRAKED = {"clock_events": 0x84}


def checks(*states):
    """What is found in each state of a card."""
    check = CheckCards(FakeCards(*states))
    return [check.check() for _ in states]


def test_a_sound_card_is_fit_however_often_it_is_asked():
    assert checks(*[{}] * 10) == [[]] * 10


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"uncorrected_ecc": 2}, "2 new uncorrectable memory errors"),
        ({"remap_failed": True}, "could not be replaced"),
        ({"retired_pages": 60}, "60 retired memory pages"),
        ({"lost": "GPU is lost"}, "does not answer (GPU is lost)"),
    ],
)
def test_broken_hardware_is_named_at_once_and_stays_named(state, words):
    before, after, *_, late = checks({}, *[state] * 8)
    assert before == []
    assert len(after) == 1
    assert after[0].startswith("H200 number 0: ")
    assert words in after[0]
    assert late == after


def test_memory_errors_from_before_the_job_are_not_held_against_a_card():
    old, still, worse = checks(*({"uncorrected_ecc": count} for count in (5, 5, 6)))
    assert (old, still) == ([], [])
    assert "1 new" in worse[0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (HOT, "91 C, and it slows down from 90 C on"),
        (BRAKED, "a slowdown by the power supply"),
        ({"clock_events": 0x40}, "for heat"),
    ],
)
def test_heat_and_throttling_count_only_when_they_persist(state, words):
    *passing, third = checks(state, state, {}, state, state, state)
    assert passing == [[]] * 5
    assert words in third[0]


def test_a_power_cap_and_what_a_card_does_not_know_are_no_faults():
    unknown = dict.fromkeys(("uncorrected_ecc", "temperature_c", "clock_events", "retired_pages"))
    assert checks(*[unknown] * 4, *[{"clock_events": 0x24}] * 4) == [[]] * 8


def test_a_worker_looks_at_its_own_cards_only():
    card = CardReading(uuid="GPU-1111-22", name="H200", index=3)
    assert is_visible(card, None)
    assert is_visible(card, "0, 3")
    assert is_visible(card, "GPU-9,GPU-1111")
    assert not is_visible(card, "0,1")
    assert not is_visible(card, "")
    assert not is_visible(card, "33")


def test_nvml_is_asked_card_by_card_and_may_know_little():
    sound, lost = NvmlCards(FakeNvml(), {}).read()
    assert sound == CardReading(
        uuid=SOUND.uuid,
        name="H200",
        index=0,
        uncorrected_ecc=3,
        retired_pages=None,
        remap_failed=True,
        temperature_c=61,
        slowdown_c=92,
        clock_events=0x44,
    )
    assert (lost.index, lost.lost) == (1, "GPU is lost")
    assert NvmlCards(FakeNvml(), {"CUDA_VISIBLE_DEVICES": "0"}).read() == [sound]
    assert NvmlCards(FakeNvml(), {"CUDA_VISIBLE_DEVICES": ""}).read() == []


def test_without_a_driver_there_are_no_cards(monkeypatch):
    monkeypatch.setattr("pliant.elastic.health._nvml", lambda: None)
    cards = open_cards({})
    assert isinstance(cards, NoCards)
    assert CheckCards(cards).check() == []
