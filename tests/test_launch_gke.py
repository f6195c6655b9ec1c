"""launch/gke.sh: its manifests fit the schemas of Kubernetes and JobSet, and it acts on what kubectl answers."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launchers import PROGRAM, calls, dry_run, fake_tools, launch, tool_directory, validate

NAMED = ["--name=drope", "--image=europe-docker.pkg.dev/lab/images/pe_lab:1"]
TPU = [*NAMED, "--type=v5e:4x4"]
GPU = [*NAMED, "--type=h100:8"]
VARIANTS = [
    ["--type=v5e:4x4"],
    ["--type=v5e:16x16", "--slices=2", "--spot", "--mount=runs:/mnt/runs", "--queue=tpus"],
    ["--type=v5e:2x4", "--chips-per-host=8", "--service-account=trainer", "--grace-seconds=30", "--restarts=0"],
    ["--type=v6e:1x1"],
    ["--type=v4:2x2x4", "--slices=3"],
    ["--type=v5p:4x4x4", "--mount=runs:/mnt/runs", "--mount=data:/mnt/data"],
    ["--type=tpu7x:2x2x1"],
    ["--type=h100:8"],
    ["--type=h100-mega:8", "--nodes=4", "--spot", "--mount=runs:/mnt/runs", "--queue=gpus"],
]


def manifest(*options: str) -> dict[str, Any]:
    return yaml.safe_load(dry_run("gke.sh", *NAMED, *options)[1])


def job(document: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = document["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(document: dict[str, Any]) -> dict[str, Any]:
    return job(document)["template"]["spec"]


def container(document: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(document)["containers"]
    return only


@pytest.mark.parametrize("options", VARIANTS, ids=" ".join)
def test_every_manifest_fits_the_schemas(options: list[str]) -> None:
    validate(manifest(*options), "jobset")


def paths(document: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all mappings of a document that have named fields."""
    found: list[tuple] = []
    if isinstance(document, dict) and path[-1:] not in [("nodeSelector",), ("labels",), ("annotations",)]:
        found += [path] if path[-1:] not in [("requests",), ("limits",)] else []
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else []
    )
    for key, inner in items:
        found += paths(inner, (*path, key))
    return found


def test_a_misspelt_field_fails_at_every_level() -> None:
    whole = manifest("--type=h100:8", "--nodes=2", "--spot", "--mount=runs:/mnt/runs")
    places = paths(whole)
    assert len(places) > 25
    for path in places:
        document = copy.deepcopy(whole)
        place: Any = document
        for key in path:
            place = place[key]
        place["replicaz"] = 1
        with pytest.raises(jsonschema.ValidationError, match="replicaz"):
            validate(document, "jobset")


@pytest.mark.parametrize(
    ("key", "value"), [("parallelism", "many"), ("backoffLimit", None), ("completions", 1.5), ("podFailurePolicy", [])]
)
def test_a_value_of_another_type_fails(key: str, value: Any) -> None:
    document = manifest("--type=v5e:4x4")
    job(document)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document, "jobset")


# From the tables of xpk 1.16 and Cluster Toolkit (1047080): label, chips of a host, hosts of a slice.
@pytest.mark.parametrize(
    ("options", "label", "chips", "hosts"),
    [
        (["--type=v4:2x2x4"], "tpu-v4-podslice", 4, 4),
        (["--type=v5e:16x16"], "tpu-v5-lite-podslice", 4, 64),
        (["--type=v5e:2x4"], "tpu-v5-lite-podslice", 4, 2),
        (["--type=v5e:2x4", "--chips-per-host=8"], "tpu-v5-lite-podslice", 8, 1),
        (["--type=v5e:1x1"], "tpu-v5-lite-podslice", 1, 1),
        (["--type=v5p:2x2x1"], "tpu-v5p-slice", 4, 1),
        (["--type=v6e:4x8"], "tpu-v6e-slice", 4, 8),
        (["--type=tpu7x:4x4x4"], "tpu7x", 4, 16),
    ],
)
def test_a_slice_has_a_pod_for_each_host(options: list[str], label: str, chips: int, hosts: int) -> None:
    document = manifest(*options)
    selector = pod(document)["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == label
    assert selector["cloud.google.com/gke-tpu-topology"] == options[0].partition(":")[2]
    assert job(document)["parallelism"] == job(document)["completions"] == hosts
    resources = container(document)["resources"]
    assert resources["limits"] == resources["requests"] == {"google.com/tpu": chips}
    assert "env" not in container(document)  # GKE tells JAX


def test_several_slices_have_a_node_pool_each() -> None:
    document = manifest("--type=v5e:4x4", "--slices=2")
    assert document["spec"]["replicatedJobs"][0]["replicas"] == 2
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert document["metadata"]["annotations"] == exclusive
    assert "annotations" not in manifest("--type=v5e:4x4")["metadata"]


def test_gpu_nodes_are_told_of_each_other() -> None:
    document = manifest("--type=h100:8", "--nodes=4")
    assert pod(document)["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert container(document)["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert job(document)["completionMode"] == "Indexed" and job(document)["completions"] == 4
    variables = {v["name"]: v for v in container(document)["env"]}
    # JobSet's host name of pod 0 of job 0: JOBSET-REPLICATEDJOB-0-0.JOBSET
    assert document["spec"]["replicatedJobs"][0]["name"] == "host"
    assert variables["COORDINATOR_ADDRESS"]["value"] == "drope-host-0-0.drope:12345"
    assert variables["PROCESS_COUNT"]["value"] == "4"
    index = variables["PROCESS_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert "env" not in container(manifest("--type=h100:8"))


def test_the_program_and_its_volumes() -> None:
    document = manifest("--type=h100:8", "--mount=runs:/mnt/runs", "--mount=data:/mnt/data")
    assert container(document)["command"] == PROGRAM
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod(document)["volumes"][:-1]}
    mounted = {m["mountPath"]: claims.get(m["name"]) for m in container(document)["volumeMounts"]}
    assert mounted == {"/mnt/runs": "runs", "/mnt/data": "data", "/dev/shm": None}


def outcome(document: dict[str, Any], status: int | None, disrupted: bool = False) -> str:
    """What JobSet does when a pod fails: the Job's message by its pod failure policy, then the first rule it matches.

    The messages are those of Kubernetes' Job controller.
    """
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for number, rule in enumerate(job(document)["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {"values": []})["values"]
        if status in codes:
            message = (
                f"Container run for pod lab/drope-slice-0-2-x failed with exit code {status} matching FailJob rule"
            )
        elif disrupted and "onPodConditions" in rule:
            message = "Pod lab/drope-slice-0-2-x has condition DisruptionTarget matching FailJob rule"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{message} at index {number}"
        break
    for rule in document["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_what_is_started_again() -> None:
    document = manifest("--type=v5e:4x4", "--restarts=7", "--grace-seconds=45")
    assert outcome(document, 2) == "FailJobSet"  # bad input
    assert outcome(document, 75) == "RestartJobSetAndIgnoreMaxRestarts"  # saved after SIGTERM
    assert outcome(document, 143, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"  # before it could save
    assert outcome(document, None, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"  # the node is gone
    assert outcome(document, 1) == outcome(document, 137) == "RestartJobSet"  # a crash, counted
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert job(document)["backoffLimit"] == 0 and pod(document)["restartPolicy"] == "Never"
    assert pod(document)["terminationGracePeriodSeconds"] == 45


def test_spot() -> None:
    document = manifest("--type=v5e:4x4", "--spot")
    assert pod(document)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod(document)["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert "tolerations" not in pod(manifest("--type=v5e:4x4"))


KUBECTL = """
kubectl() {
  if [ -n "${DENIED:-}" ]; then echo "error: forbidden" >&2; return 1; fi
  while [[ $1 == --* ]]; do shift; done
  case $1 in
    get) if [ -e "$SANDBOX/jobset" ]; then echo "drope $(cat "$SANDBOX/jobset")"; fi ;;
    apply) cat > "$SANDBOX/applied"; : > "$SANDBOX/jobset" ;;
    logs) echo "a line of the log"; echo "${END:-Completed}" > "$SANDBOX/jobset" ;;
    delete) rm "$SANDBOX/jobset" ;;
  esac
}
"""


@pytest.mark.parametrize(("state", "status"), [("Completed", 0), ("Failed", 1)])
def test_a_run_is_followed_to_its_end(tmp_path: Path, state: str, status: int) -> None:
    tools = fake_tools(tmp_path, KUBECTL, "kubectl")
    result = launch("gke.sh", *TPU, "--", *PROGRAM, **tools, END=state)
    assert result.returncode == status, result.stderr
    assert "a line of the log" in result.stdout
    assert (tmp_path / "applied").read_text() == dry_run("gke.sh", *TPU)[1]
    assert [c[1] for c in calls(tmp_path)] == ["get", "apply", "get", "logs", "get"]


def test_one_run_of_a_name_at_a_time(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, KUBECTL, "kubectl")
    (tmp_path / "jobset").touch()  # without a terminal state
    refused = launch("gke.sh", *TPU, "--", *PROGRAM, **tools)
    assert refused.returncode == 2 and "--attach" in refused.stderr
    assert [c[1] for c in calls(tmp_path)] == ["get"]
    (tmp_path / "jobset").write_text("Failed")  # replaced
    (tmp_path / "calls").unlink()
    again = launch("gke.sh", *TPU, "--detach", "--", *PROGRAM, **tools)
    assert again.returncode == 0, again.stderr
    assert [c[1] for c in calls(tmp_path)] == ["get", "delete", "apply"]


def test_stop_deletes_and_attach_tells_that_it_is_gone(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, KUBECTL, "kubectl")
    (tmp_path / "jobset").touch()
    assert launch("gke.sh", "--name=drope", "--namespace=lab", "--stop", **tools).returncode == 0
    assert calls(tmp_path) == [["kubectl", "--namespace=lab", "delete", "jobset", "drope", "--cascade=foreground"]]
    gone = launch("gke.sh", "--name=drope", "--attach", **tools)
    assert gone.returncode == 1 and "no JobSet drope" in gone.stderr


def test_nothing_is_submitted_when_kubectl_fails(tmp_path: Path) -> None:
    result = launch("gke.sh", *TPU, "--", *PROGRAM, **fake_tools(tmp_path, KUBECTL, "kubectl"), DENIED="1")
    assert result.returncode == 1 and "forbidden" in result.stderr
    assert [c[1] for c in calls(tmp_path)] == ["get"]


# The flags of `gcluster job submit`, from cmd/job/submit.go and cmd/job/job.go of Cluster Toolkit at 1047080.
GCLUSTER = {
    *("name", "image", "command", "compute-type", "topology", "num-slices", "num-nodes", "restarts", "grace-period"),
    *("restart-on-exit-codes", "node-constraint", "queue", "service-account", "mount"),
    *("cluster", "location", "project"),
}


def submission(*options: str) -> dict[str, str]:
    (submit, logs), document = dry_run("gke.sh", *NAMED, "--gcluster", *options)
    assert submit[:3] == ["gcluster", "job", "submit"] and document == ""
    assert logs[:5] == ["gcluster", "job", "logs", "drope", "--follow"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in submit[3:])
    assert flags.keys() <= GCLUSTER
    return flags


def test_cluster_toolkit_gets_the_same_run() -> None:
    flags = submission("--type=v5e:16x16", "--slices=2", "--mount=runs:/mnt/runs", "--gcluster-arg=--cluster=tpus")
    assert flags["compute-type"] == "ct5lp-hightpu-4t" and flags["topology"] == "16x16" and flags["num-slices"] == "2"
    assert shlex.split(flags["command"]) == ["exec", *PROGRAM]
    assert flags["mount"] == "runs:/mnt/runs:rw" and flags["cluster"] == "tpus"
    # Every status but that of bad input.
    again = [int(status) for status in flags["restart-on-exit-codes"].split(",")]
    assert {1, 75, 137, 143} <= set(again) and 2 not in again
    flags = submission("--type=h100-mega:8", "--nodes=4", "--spot")
    assert flags["compute-type"] == "h100-mega-80gb-8" and flags["num-nodes"] == "4" and "topology" not in flags
    words = shlex.split(flags["command"])
    assert words[0] == "COORDINATOR_ADDRESS=drope-main-job-0-0.drope:12345"
    assert words[1:3] == ["PROCESS_COUNT=4", "PROCESS_INDEX=$JOB_COMPLETION_INDEX"] and words[4:] == PROGRAM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([a for a in TPU if "--name" not in a], "--name"),
        (["--name=Drope", *TPU[1:]], "lower-case"),
        (["--name=a" + 40 * "b", *TPU[1:]], "at most 40"),
        (["--gcluster", "--name=a" + 30 * "b", *TPU[1:]], "at most 28"),
        ([a for a in TPU if "--image" not in a], "--image"),
        (NAMED, "--type"),
        ([*NAMED, "--type=v9:2x2"], "v5e:16x16"),
        ([*NAMED, "--type=v5e:2x2x2"], "2 numbers"),
        ([*NAMED, "--type=v5p:4x4"], "3 numbers"),
        ([*NAMED, "--type=v5e"], "topology"),
        ([*NAMED, "--type=h100"], "h100:8"),
        ([*NAMED, "--type=v5e:1x1", "--chips-per-host=8"], "divide"),
        ([*NAMED, "--type=v5p:2x2x2", "--chips-per-host=8"], "v5p has 4"),
        ([*TPU, "--nodes=2"], "--nodes"),
        ([*GPU, "--slices=2"], "--slices"),
        ([*TPU, "--slices=none"], "--slices"),
        ([*TPU, "--mount=runs"], "runs:/mnt/runs"),
        ([*TPU, "--queue=a\nb"], "control character"),
        ([*TPU, "--sopt"], "--sopt"),
        ([*TPU, "--gcluster", "--namespace=lab"], "--namespace"),
        ([*TPU, "--gcluster-arg=--cluster=c"], "--gcluster"),
        ([*TPU, "--attach", "--stop"], "choose one"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = launch("gke.sh", *arguments, "--dry-run", "--", *PROGRAM)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("error") == 1


def test_without_kubectl_only_a_dry_run_works(tmp_path: Path) -> None:
    path = tool_directory(tmp_path)
    result = launch("gke.sh", *TPU, "--", *PROGRAM, PATH=path)
    assert result.returncode == 2 and "kubectl" in result.stderr
    assert launch("gke.sh", *TPU, "--dry-run", "--", *PROGRAM, PATH=path).returncode == 0
