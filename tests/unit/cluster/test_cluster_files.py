"""The files under cluster/ fit what reads them: KubeRay's schemas, Ray's launcher, this repository.

The schemas are KubeRay's own, kept in ../shared/schemas beside the repository.
"""

import copy
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = ROOT.parent / "shared" / "schemas"
KUBERAY = sorted((ROOT / "cluster" / "kuberay").glob("*.yaml"))
RAY_UP = sorted((ROOT / "cluster" / "ray-up").glob("*.yaml"))

Tree = dict[str, Any]


def read(path: Path) -> list[Tree]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def documents(kind: str) -> list[Tree]:
    return [document for path in KUBERAY for document in read(path) if document["kind"] == kind]


def ray_clusters() -> list[Tree]:
    return [cluster["spec"] for cluster in documents("RayCluster")] + [
        job["spec"]["rayClusterSpec"] for job in documents("RayJob")
    ]


def pod_specs() -> list[Tree]:
    pods = [job["spec"]["submitterPodTemplate"]["spec"] for job in documents("RayJob")]
    for cluster in ray_clusters():
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pods.append(group["template"]["spec"])
    return pods


@cache
def strict_schema(kind: str) -> Tree:
    """KubeRay's schema, made to refuse fields that it does not name.

    Kubernetes itself drops an unknown field without a word, so a typo would go unnoticed.
    """
    path = SCHEMAS / f"ray.io_{kind}_v1.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not in ../shared/schemas")
    schema: Tree = closed(json.loads(path.read_text()))
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def closed(schema: Any) -> Any:
    """The schema with every object limited to the properties that it lists."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        # Below "properties" the keys are names of fields, one of which may be "properties".
        result["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        result.setdefault("additionalProperties", False)
    return result


def validate(document: Tree) -> None:
    jsonschema.Draft7Validator(strict_schema(document["kind"])).validate(document)


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
def test_kuberay_takes_every_manifest(path: Path) -> None:
    for document in read(path):
        if document["kind"] in ("RayCluster", "RayJob"):
            assert document["apiVersion"] == "ray.io/v1"
            validate(document)
        else:
            assert (document["apiVersion"], document["kind"]) == ("v1", "PersistentVolumeClaim")


@pytest.mark.parametrize(
    ("where", "typo"),
    [
        ("spec", "shutdownAfterJobFinished"),
        ("spec.rayClusterSpec", "enableInTreeAutoscalling"),
        ("spec.rayClusterSpec.workerGroupSpecs.0", "maxReplica"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec", "volume"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0", "resource"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources", "request"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.securityContext", "runAsNonroot"),
    ],
)
def test_a_typo_in_a_manifest_is_caught(where: str, typo: str) -> None:
    [job] = documents("RayJob")
    spoiled = copy.deepcopy(job)
    place: Any = spoiled
    for key in where.split("."):
        place = place[int(key)] if key.isdigit() else place[key]
    place[typo] = True
    validate(job)
    with pytest.raises(jsonschema.ValidationError, match=typo):
        validate(spoiled)


def test_a_value_of_the_wrong_type_in_a_manifest_is_caught() -> None:
    [job] = documents("RayJob")
    spoiled = copy.deepcopy(job)
    spoiled["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(jsonschema.ValidationError, match="0 is not of type 'string'"):
        validate(spoiled)


def test_both_manifests_describe_the_same_cluster() -> None:
    first, second = ray_clusters()
    assert first == second


def test_worker_groups_are_elastic_and_the_head_holds_no_worker() -> None:
    for cluster in ray_clusters():
        assert cluster["enableInTreeAutoscaling"] is True
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        for group in cluster["workerGroupSpecs"]:
            low, start, high = (group[k] for k in ("minReplicas", "replicas", "maxReplicas"))
            assert 0 <= low <= start <= high
            assert low < high


def test_authentication_is_said_aloud() -> None:
    for cluster in ray_clusters():
        assert cluster["authOptions"]["mode"] == "token"
    for path in RAY_UP:
        [config] = read(path)
        for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
            start = commands[-1]
            assert "RAY_AUTH_MODE=token" in start
            assert "--dashboard-host=0.0.0.0" not in start


def test_no_pod_runs_as_root_or_without_bounds() -> None:
    for pod in pod_specs():
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert set(container["resources"]) == {"requests", "limits"}


def test_every_ray_pod_mounts_the_claim_of_the_runs() -> None:
    [claim] = documents("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for cluster in ray_clusters():
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            [volume] = pod["volumes"]
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            for container in pod["containers"]:
                assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/runs"}]


def test_a_job_runs_files_of_this_repository_and_keeps_its_runs_on_the_claim() -> None:
    for job in documents("RayJob"):
        words = shlex.split(job["spec"]["entrypoint"])
        files = [word for word in words if word.endswith((".py", ".yaml"))]
        assert len(files) == 2
        assert [name for name in files if not (ROOT / name).is_file()] == []
        assert words[words.index("--runs-dir") + 1] == "/runs"


def test_a_rayjob_is_stopped_like_a_submitted_job() -> None:
    for job in documents("RayJob"):
        variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
        assert variables == {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "600"}
        assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_images_and_ray_are_pinned_to_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [ray] = [line for line in project["dependencies"] if line.startswith("ray[")]
    for cluster in ray_clusters():
        assert ray.endswith(f"=={cluster['rayVersion']}")
    images = {container["image"] for pod in pod_specs() for container in pod["containers"]}
    assert images == {f"pliant:{project['version']}"}


def prepared(path: Path) -> Tree:
    """The config as `ray up` reads it, defaults filled in."""
    from ray.autoscaler._private.util import prepare_config

    config: Tree = prepare_config(read(path)[0])
    return config


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_up_takes_every_cluster_file(path: Path) -> None:
    from ray.autoscaler._private.util import validate_config

    config = prepared(path)
    validate_config(config)
    with pytest.raises(jsonschema.ValidationError, match="setup_command'"):
        validate_config(config | {"setup_command": []})


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_bounds_of_a_launched_cluster_are_in_order(path: Path) -> None:
    config = prepared(path)
    workers = {k: v for k, v in config["available_node_types"].items() if v["max_workers"]}
    assert workers
    for kind in workers.values():
        assert 0 <= kind["min_workers"] <= kind["max_workers"] <= config["max_workers"]


def test_own_machines_are_all_used() -> None:
    [config] = read(ROOT / "cluster" / "ray-up" / "local.yaml")
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])


def test_on_aws_workers_are_spot_machines_down_to_none_and_the_head_is_not() -> None:
    [config] = read(ROOT / "cluster" / "ray-up" / "aws.yaml")
    kinds = config["available_node_types"]
    head = kinds.pop(config["head_node_type"])
    assert "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"]["CPU"] == 0
    for kind in kinds.values():
        assert kind["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
        assert kind["min_workers"] == 0


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_the_launcher_copies_files_that_exist(path: Path) -> None:
    [config] = read(path)
    sources = [source for source in config["file_mounts"].values() if not source.startswith("~")]
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_image_copies_files_that_exist() -> None:
    text = (ROOT / "cluster" / "docker" / "Dockerfile").read_text()
    sources = [
        name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]
    ]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignored = (ROOT / "cluster" / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{source.split('/')[0]}" for source in sources} <= set(ignored)


def test_the_launcher_installs_what_the_image_installs() -> None:
    text = (ROOT / "cluster" / "docker" / "Dockerfile").read_text().replace("--no-cache-dir ", "")
    steps = [re.sub(r"\S*requirements", "requirements", s) for s in re.findall(r"pip (.+)", text)]
    for path in RAY_UP:
        [config] = read(path)
        commands = [c for c in config["setup_commands"] if "bin/pip " in c]
        launched = [
            re.sub(r"\S*requirements", "requirements", c.split("pip ")[1]) for c in commands
        ]
        assert [step.replace("~/pliant", ".") for step in launched] == steps
