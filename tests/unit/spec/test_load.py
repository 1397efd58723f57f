"""A job is what its layers say, the later ones first; whatever is not a job is refused in a
sentence that names the key."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from pliant.errors import SpecError
from pliant.spec import JobSpec, load_spec
from pliant.spec.load import all_keys, build_spec, merge, read_yaml

REPOSITORY = Path(__file__).parents[3]
DEMO = REPOSITORY / "jobs" / "specs" / "demo.yaml"
TUNING_FILES = sorted((REPOSITORY / "tuning").rglob("*.yaml"))
SPEC_FILES = [
    *sorted((REPOSITORY / "jobs" / "specs").rglob("*.yaml")),
    *(path for path in TUNING_FILES if "model" in read_yaml(path)),
]
OVERLAYS = [path for path in TUNING_FILES if read_yaml(path).keys() < JobSpec.model_fields.keys()]
"""Files in tuning/ that change a job."""


def refusal(path, **layers):
    """What the user is told."""
    with pytest.raises(SpecError) as caught:
        load_spec(path, **({"environ": {}} | layers))
    assert caught.value.exit_code == 2
    return str(caught.value)


def set_to(path, *settings):
    return load_spec(path, environ={}, settings=settings)


def overlay(path, text):
    file = path.with_name("overlay.yaml")
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("path", SPEC_FILES, ids=lambda path: path.name)
def test_every_spec_of_the_repository_loads(path):
    assert load_spec(path, environ={}).name


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_every_overlay_of_the_repository_fits_the_demo(path):
    assert load_spec(DEMO, [path], environ={}) != load_spec(DEMO, environ={})


def test_there_are_specs_to_load():
    assert SPEC_FILES


def test_each_layer_has_its_say_over_those_before_it(spec_file):
    assert set_to(spec_file).training.lr == 3e-4  # the default
    spec_file.write_text(spec_file.read_text() + "  lr: 1.0e-3\n")
    first = overlay(spec_file, "training: {lr: 2.0e-3, seed: 1}")
    second = spec_file.with_name("second.yaml")
    second.write_text("training: {lr: 3.0e-3}")
    environ = {"PLIANT__TRAINING__LR": "4e-3"}
    settings = ["training.lr=5e-3", "training.lr=6e-3"]
    assert load_spec(spec_file, environ={}).training.lr == 1e-3
    assert load_spec(spec_file, [first], {}).training.lr == 2e-3
    assert load_spec(spec_file, [first, second], {}).training.lr == 3e-3
    assert load_spec(spec_file, [first, second], environ).training.lr == 4e-3
    spec = load_spec(spec_file, [first, second], environ, settings)
    assert (spec.training.lr, spec.training.seed, spec.training.steps) == (6e-3, 1, 10)


def test_a_layer_can_take_back_what_one_below_it_set(spec_file):
    spec = set_to(spec_file, "training.steps=null", "training.epochs=2")
    assert (spec.training.steps, spec.training.epochs) == (None, 2)


def test_a_list_is_replaced_and_a_mapping_is_merged():
    base = {"a": {"b": [1, 2], "c": 3}, "d": {"e": 1}}
    assert merge(base, {"a": {"b": [9]}, "d": 5}) == {"a": {"b": [9], "c": 3}, "d": 5}
    assert base == {"a": {"b": [1, 2], "c": 3}, "d": {"e": 1}}


def test_other_variables_of_the_environment_are_no_settings(spec_file):
    spec = load_spec(spec_file, environ={"PLIANT_TRAINING_LR": "1", "LR": "1", "PLIANT": "x"})
    assert spec.training.lr == 3e-4


def test_the_process_environment_counts(spec_file, monkeypatch):
    monkeypatch.setenv("PLIANT__TRAINING__LR", "1e-4")
    assert load_spec(spec_file).training.lr == 1e-4


def test_a_deep_key_can_be_set_from_every_layer(spec_file):
    environ = {"PLIANT__TRAINING__ACCELERATOR__BUFFER_SIZE_MB": "8"}
    assert load_spec(spec_file, environ=environ).training.accelerator.buffer_size_mb == 8
    spec = set_to(spec_file, "elastic.drills=[{step: 3}]", "model.config.num_hidden_layers=1")
    assert spec.elastic.drills[0].step == 3
    assert spec.model.config == {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("training.global_batch_size='16'", "global_batch_size", 16),
        ("training.global_batch_size=16", "global_batch_size", 16),
        ("training.global_batch_size=1_6", "global_batch_size", 16),
        ("training.steps=1e3", "steps", 1000),
        ("training.lr=1e-4", "lr", 1e-4),
        ("training.lr='1e-4'", "lr", 1e-4),
        ("training.lr=1.0e-4", "lr", 1e-4),
        ("training.lr=1", "lr", 1.0),
        ("training.betas=['0.8', 0.9]", "betas", (0.8, 0.9)),
    ],
)
def test_a_number_may_be_written_as_text(spec_file, setting, key, value):
    found = getattr(set_to(spec_file, setting).training, key)
    assert found == value
    assert type(found) is type(value)


def test_numbers_with_few_choices_may_be_text_too(spec_file):
    spec = set_to(spec_file, "deepspeed.zero_stage='2'", "parallel.tensor='1'")
    assert (spec.deepspeed.zero_stage, spec.parallel.tensor) == (2, 1)
    assert set_to(spec_file, "data.block_steps='4'").data.block_steps == 4
    assert set_to(spec_file, "data.block_steps=auto").data.block_steps == "auto"


@pytest.mark.parametrize(
    "setting",
    [
        "training.global_batch_size=true",
        "training.lr=on",
        "deepspeed.zero_stage=yes",
        "parallel.tensor=true",
        "data.block_steps=false",
        "training.lr=.inf",
        "training.lr=.nan",
        "training.lr=infinity",
        "training.lr=0",
        "training.steps=1.5",
        "training.steps=0",
        "training.seed=18446744073709551616",
        "training.betas=[0.9]",
        "deepspeed.zero_stage=4",
        "parallel.pipeline=2",
        "data.seq_len=1",
        "name=a/b",
        "name=''",
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(spec_file, setting):
    assert setting.split("=")[0] in refusal(spec_file, settings=[setting])


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("trainig.lr=1", "training"),
        ("training.lrr=1", "training.lr"),
        ("training.step=1", "training.steps"),
        ("training.accelerator.enable_metadata_cach=auto", "accelerator.enable_metadata_cache"),
        ("data.tokenizer.pth=x", "data.tokenizer.path"),
        ("model.lora.alpa=1", "model.lora.alpha"),
        ("elastic.drills=[{ran: 1, step: 1}]", "elastic.drills.0.rank"),
        # the right key in the wrong section
        ("training.min_workers=1", "elastic.min_workers"),
        ("data.steps=1", "training.steps"),
        ("elastic.zero_stage=1", "deepspeed.zero_stage"),
        ("lr=1", "training.lr"),
        ("model.enable_metadata_cache=false", "training.accelerator.enable_metadata_cache"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(spec_file, setting, meant):
    message = refusal(spec_file, settings=[setting])
    assert "is not a key of a job spec" in message
    assert message.endswith(f"Did you mean {meant}?") or f".{meant}?" in message


def test_a_key_like_no_other_is_answered_with_the_known_ones(spec_file):
    message = refusal(spec_file, settings=["checkpoint.qqqq=1"])
    assert message.endswith(
        "checkpoint.qqqq is not a key of a job spec. Known here: best_metric, best_mode, "
        "every, hot_every, keep, keep_best, keep_every, storage."
    )


def test_an_unknown_variable_of_the_environment_is_refused_too(spec_file):
    message = refusal(spec_file, environ={"PLIANT__TRAINING__LRR": "1"})
    assert "Did you mean training.lr?" in message


def test_all_faults_are_named_at_once(spec_file):
    message = refusal(spec_file, settings=["training.lr=x", "data.seq_len=-1", "nam=y"])
    assert len(message.splitlines()) == 3


def test_a_field_with_alternatives_is_one_fault_under_its_own_name(spec_file):
    message = refusal(spec_file, settings=["data.block_steps=x"])
    assert "data.block_steps is 'x'. " in message
    assert "Or: Input should be 'auto'." in message
    assert len(message.splitlines()) == 1
    for setting in ("data.train=5", "training.accelerator.enable_double_buffer=perhaps"):
        key = setting.split("=")[0]
        assert f": {key} is " in refusal(spec_file, settings=[setting])


def test_a_mapping_of_free_keys_keeps_them_in_the_message(spec_file):
    assert "data.columns.int is 1." in refusal(spec_file, settings=["data.columns={int: 1}"])


def test_a_missing_key_is_named(spec_file):
    spec_file.write_text("name: job\nmodel: {config: {model_type: llama}}\ndata: {train: x}\n")
    message = refusal(spec_file)
    for key in ("data.tokenizer", "data.seq_len", "training"):
        assert f"{key} is missing." in message


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.path=x"], "model needs exactly one of config, path and factory"),
        (["model.config=null"], "none of them is set"),
        (["model.config=null", "model.config={a: 1}"], "config has no model_type"),
        (["training.epochs=1"], "training needs exactly one of steps and epochs"),
        (["training.micro_batch_size=3"], "not a multiple of micro_batch_size 3"),
        (["elastic.min_workers=2"], "min_workers 2 is above max_workers 1"),
        (["data.split={validation: 0.5, test: 0.5}"], "leaves nothing to train on"),
        (["data.tokenizer.train_vocab_size=300"], "exactly one of path and train_vocab_size"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(spec_file, settings, sentence):
    assert sentence in refusal(spec_file, settings=settings)


def test_a_missing_file_a_directory_and_a_file_within_a_file_are_told_apart(spec_file, tmp_path):
    assert "There is no file" in refusal(tmp_path / "none.yaml")
    assert "is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal(spec_file / "x.yaml")
    assert "There is no file" in refusal(spec_file, overlays=[tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"a: [1,\nb: 2", ", line 2: "),
        (b"\ta: 1", "A job spec is YAML"),
        (b"name: \xff\xfe", "is not UTF-8 text"),
        (b"", "holds no mapping"),
        (b"- a\n- b", "holds no mapping"),
        (b"just words", "holds no mapping"),
        (b"a: !!python/object:os.system {}", "A job spec is YAML"),
        (b"name: 2024-13-45", "Quote what is meant as text"),
        (b"training:\n  lr: 1\ntraining:\n  seed: 1", "line 3: the key training is given twice"),
        (b"a: {b: 1, b: 2}", "the key b is given twice"),
    ],
)
def test_a_file_that_holds_no_spec_is_refused(tmp_path, text, sentence):
    path = tmp_path / "job.yaml"
    path.write_bytes(text)
    assert sentence in refusal(path)


@pytest.mark.parametrize("setting", ["training.lr", "=3", "", "training.lr:1"])
def test_a_setting_without_a_key_or_value_is_refused(spec_file, setting):
    assert "is not KEY=VALUE" in refusal(spec_file, settings=[setting])


def test_a_setting_that_is_no_yaml_is_refused(spec_file):
    assert "is not a YAML value" in refusal(spec_file, settings=["training.lr=[1"])
    assert "is not a YAML value" in refusal(spec_file, settings=["name=2024-13-45"])
    assert "is not a YAML value" in refusal(spec_file, environ={"PLIANT__NAME": "{"})


def test_a_value_may_hold_an_equals_sign(spec_file):
    assert set_to(spec_file, "tracking.tags.a=b=c").tracking.tags == {"a": "b=c"}


def test_environment_variables_of_workers_are_text(spec_file):
    extra = "env: {INT: 1, FLOAT: 1.5, A: true, B: off, C: , TEXT: a b, QUOTED: '03'}\n"
    spec_file.write_text(spec_file.read_text() + extra)
    assert set_to(spec_file).env == {
        "INT": "1",
        "FLOAT": "1.5",
        "A": "true",
        "B": "false",
        "C": "",
        "TEXT": "a b",
        "QUOTED": "03",
    }
    assert "env.A" in refusal(spec_file, settings=["env={A: [1]}"])


def test_a_worker_variable_set_from_outside_is_taken_as_it_stands(spec_file):
    environ = {"PLIANT__ENV__NCCL_DEBUG": "INFO", "PLIANT__ENV__MY__Name": "on"}
    settings = ["env.GID=03", "env.AT=12:30", "env.OPEN=["]
    assert load_spec(spec_file, environ=environ, settings=settings).env == {
        "NCCL_DEBUG": "INFO",
        "MY__Name": "on",
        "GID": "03",
        "AT": "12:30",
        "OPEN": "[",
    }


def test_what_was_saved_loads_again_unchanged(spec_file, tmp_path):
    spec = set_to(spec_file, "env.A=1", "training.betas=[0.8, 0.9]", "model.lora.r=4")
    path = tmp_path / "saved.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert load_spec(path, environ={}) == spec


def test_a_spec_cannot_be_changed(spec_file):
    with pytest.raises(ValueError, match="frozen"):
        set_to(spec_file).training.lr = 1.0


def test_the_schema_covers_every_field_and_accepts_every_spec():
    schema = JobSpec.model_json_schema()
    assert sorted(keys_of(schema, schema)) == sorted(all_keys())
    for path in SPEC_FILES:
        jsonschema.validate(build_spec(read_yaml(path), "a test").model_dump(mode="json"), schema)


def keys_of(schema, part, prefix=""):
    for name, field in part.get("properties", {}).items():
        yield prefix + name
        for below in [field, *field.get("anyOf", []), field.get("items", {})]:
            if "$ref" in below:
                target = schema["$defs"][below["$ref"].rsplit("/", 1)[1]]
                yield from keys_of(schema, target, f"{prefix}{name}.")


def test_every_key_without_an_obvious_meaning_is_documented():
    schema = JobSpec.model_json_schema()
    fields = schema["$defs"]["TrainingSpec"]["properties"]
    assert fields["global_batch_size"]["description"].startswith("Packed rows per optimizer step")
