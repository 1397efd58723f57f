"""The contract with DeepSpeed: the version is the pinned one and has what `deepspeed_adapter` uses.

That the state it finds is the right one is tested in `test_state`; this file only says clearly what
has moved when another version is installed.
"""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

from pliant.training.deepspeed_adapter import import_deepspeed

PINNED = "0.19.8"


@pytest.fixture(scope="module")
def deepspeed():
    return import_deepspeed("cpu")


def test_the_pinned_version_is_installed():
    found = importlib.metadata.version("deepspeed")
    assert found == PINNED, (
        f"DeepSpeed {found} is installed, and the adapter was written against {PINNED}. Run the "
        "tests of training on it, then move the pin here and in pyproject.toml together."
    )


STAGE_1_2 = [
    "single_partition_of_fp32_groups",
    "parallel_partitioned_bit16_groups",
    "bit16_groups_flat",
    "real_dp_process_group",
    "nccl_start_alignment_factor",
    "allgather_bucket_size",
    "_global_grad_norm",
    "round_robin_bit16_groups",
    "round_robin_bit16_offsets",
]
STAGE_3 = [
    "grad_position",
    "get_param_id",
    "fp32_partitioned_groups_flat",
    "fp16_partitioned_groups_flat",
    "fp16_partitioned_groups",
    "unflatten",
    "persistent_parameters",
    "dp_process_group",
    "_global_grad_norm",
]
ENGINE = [
    "zero_optimization_stage",
    "get_global_grad_norm",
    "fp16_enabled",
    "global_steps",
    "managed_gradient_accumulation",
    "scale_wrt_gas",
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("deepspeed.runtime.zero.stage_1_and_2", STAGE_1_2),
        ("deepspeed.runtime.zero.stage3", STAGE_3),
        ("deepspeed.runtime.zero.partition_parameters", ["ds_numel", "ds_tensor"]),
        ("deepspeed.runtime.engine", ENGINE),
        ("deepspeed.runtime.fp16.unfused_optimizer", ["fp16_groups", "fp32_groups", "cur_scale"]),
        ("deepspeed.runtime.fp16.loss_scaler", ["cur_scale"]),
    ],
)
def test_deepspeed_still_has_what_the_adapter_uses(deepspeed, module, names):
    source = inspect.getsource(importlib.import_module(module))
    missing = [name for name in names if name not in source]
    assert not missing, (
        f"{module} of DeepSpeed {importlib.metadata.version('deepspeed')} has no "
        f"{', '.join(missing)}. Look for what took its place and change deepspeed_adapter.py."
    )


def test_partitions_are_gathered_with_these_arguments(deepspeed):
    from deepspeed.runtime.utils import all_gather_dp_groups

    assert {
        "groups_flat",
        "partitioned_param_groups",
        "dp_process_group",
        "start_alignment_factor",
        "allgather_bucket_size",
    } == set(inspect.signature(all_gather_dp_groups).parameters)


def test_no_operator_is_compiled_for_the_cpu(deepspeed):
    assert deepspeed.ops.__dict__["__compatible_ops__"] == {}


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()


def test_importing_deepspeed_does_not_import_mlflow_and_leaves_it_importable():
    code = (
        "import sys, os\n"
        "from pliant.training.deepspeed_adapter import import_deepspeed\n"
        "import_deepspeed('cpu')\n"
        "print(any(name.partition('.')[0] == 'mlflow' for name in sys.modules))\n"
        "print(os.environ['DS_ACCELERATOR'])\n"
        "import mlflow.exceptions\n"
        "print(mlflow.exceptions.MlflowException.__name__)\n"
        "import_deepspeed('cpu')\n"
        "print('mlflow' in sys.modules)\n"
    )
    assert run(code)[-4:] == ["False", "cpu", "MlflowException", "True"]
