"""Makes launch_schemas.json: the schemas of a JobSet and of a SkyPilot task, which tests/test_launch_gke.py and
tests/test_launch_sky.py check manifests against. Run in an environment with these packages (Apache-2.0, all three):

    pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 skypilot==0.14.1
    python tests/data/make_launch_schemas.py

kubernetes-validate has the JSON schemas of Kubernetes 1.34, made from its OpenAPI description. kubeflow-trainer-api has
the types of JobSet v1alpha2, made from JobSet's OpenAPI description. They are kept without descriptions and defaults,
with nothing that a JobSet cannot reach, and stricter in two ways: a field that is not named is refused, and so is null.
"""

import importlib.metadata
import json
import re
from importlib import resources
from pathlib import Path

from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from sky.utils import schemas

KUBERNETES = "v1.34.0-local-strict"
# JobSet's types that are Kubernetes' own, by their names in the two packages.
SHARED = {
    "IoK8sApiBatchV1JobTemplateSpec": "io.k8s.api.batch.v1.JobTemplateSpec",
    "IoK8sApiCoreV1PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
    "IoK8sApimachineryPkgApisMetaV1Condition": "io.k8s.apimachinery.pkg.apis.meta.v1.Condition",
}


def reduced(schema: object) -> object:
    """A schema without prose, defaults and null."""
    if isinstance(schema, list):
        return [reduced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (choices := schema.get("anyOf")) and {"type": "null"} in choices:
        choices = [choice for choice in choices if choice != {"type": "null"}]
        schema = choices[0] if len(choices) == 1 else schema | {"anyOf": choices}
    out = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: reduced(inner) for name, inner in value.items()}
        elif key == "type" and isinstance(value, list):
            (out[key],) = [kind for kind in value if kind != "null"]
        elif key == "$ref":
            name = value.rpartition("/")[2]
            out[key] = f"#/$defs/{SHARED.get(name, name)}"
        elif not (key in ("description", "default", "title", "$schema", "$id") or key.startswith("x-kubernetes")):
            out[key] = reduced(value)
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    return out


def jobset() -> dict:
    """The schema of a JobSet, with what it refers to."""
    path = resources.files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / "_definitions.json"
    definitions = json.loads(path.read_text())["$defs"]
    root = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    own = {name: inner for name, inner in root.pop("$defs").items() if name.startswith("Jobset")}
    root = reduced(root)
    root["required"] = ["apiVersion", "kind", "metadata", "spec"]
    root["properties"]["apiVersion"] = {"const": "jobset.x-k8s.io/v1alpha2"}
    root["properties"]["kind"] = {"const": "JobSet"}
    found: dict[str, object] = {}
    waiting = re.findall(r'#/\$defs/([^"]+)', json.dumps(root))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = reduced(own[name] if name in own else definitions[name])
            waiting += re.findall(r'#/\$defs/([^"]+)', json.dumps(found[name]))
    return root | {"$defs": found}


def sky_task() -> dict:
    """The schema of a SkyPilot task; `config` and other tools' sections are not looked into."""
    task, own = schemas.get_task_schema(), schemas.get_resources_schema()
    task["properties"]["config"] = {"type": "object"}
    task["properties"]["resources"] = own
    (recovery,) = [c for c in own["properties"]["job_recovery"]["anyOf"] if c["type"] == "object"]
    recovery["additionalProperties"] = False  # the client leaves it to the server, whose plugins may add some
    for name in ("any_of", "ordered", "image_id", "labels", "autostop"):
        own["properties"].pop(name, None)
    return reduced(task)


if __name__ == "__main__":
    packages = ("kubernetes-validate", "kubeflow-trainer-api", "skypilot")
    made = {
        "made_from": {name: importlib.metadata.version(name) for name in packages} | {"kubernetes": KUBERNETES},
        "jobset": jobset(),
        "sky_task": sky_task(),
    }
    out = Path(__file__).with_name("launch_schemas.json")
    out.write_text(json.dumps(made, sort_keys=True, separators=(",", ":")) + "\n")
    print(out, out.stat().st_size)
