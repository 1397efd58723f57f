from mlflow.utils.validation import _validate_param

from pliant.tracking import flatten_params
from pliant.tracking.parameters import MAX_KEY, MAX_VALUE, clean_name


def test_nested_settings_get_dotted_keys_and_json_values() -> None:
    tree = {
        "training": {"lr": 1e-4, "betas": (0.9, 0.95), "exact": True},
        "model": {"path": None, "args": {}},
        "name": "bee",
    }
    assert flatten_params(tree) == {
        "training.lr": "0.0001",
        "training.betas": "[0.9, 0.95]",
        "training.exact": "true",
        "model.path": "null",
        "model.args": "{}",
        "name": "bee",
    }


def test_long_values_are_shortened_and_say_so() -> None:
    (value,) = flatten_params({"prompt": "x" * 10_000}).values()
    assert len(value) == MAX_VALUE
    assert value.endswith("xxx... (10000 characters)")
    assert flatten_params({"prompt": "x" * MAX_VALUE}) == {"prompt": "x" * MAX_VALUE}


def test_keys_are_ones_that_mlflow_accepts_and_stay_apart() -> None:
    odd = ["", ".", "..", "/etc", "a//b", "a=b", "a?b", "a\nb", "键", "../up", "k" * 300]
    tree = dict.fromkeys([*odd, "k" * 301], "1")
    flat = flatten_params(tree)
    assert len(flat) == len(tree)
    assert all(len(key) <= MAX_KEY for key in flat)
    for key, value in flat.items():
        _validate_param(key, value)


def test_names_that_mlflow_accepts_are_kept() -> None:
    for name in ("loss", "system/cpu_utilization_percentage", "a.b-c d:e"):
        assert clean_name(name) == name


def test_anything_becomes_text() -> None:
    endless: list[object] = []
    endless.append(endless)
    flat = flatten_params({"a": endless, "b": object(), "c": {1: {2: 3}}, "d": {("x",): {3}}})
    assert flat["c.1.2"] == "3"
    assert all(isinstance(value, str) for value in flat.values())


def test_secrets_of_the_environment_are_not_recorded() -> None:
    env = {"HF_TOKEN": "hf_x", "MODE": "fast", "DB": "postgres://me:pw@host/db"}
    flat = flatten_params({"env": env, "model": {"pad_token_id": 0}})
    assert flat == {
        "env.HF_TOKEN": "(not recorded)",
        "env.MODE": "fast",
        "env.DB": "(not recorded)",
        "model.pad_token_id": "0",
    }
