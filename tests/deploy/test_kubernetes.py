"""The manifests and the Helm chart: rendered by kubectl and helm, validated by the schemas of Kubernetes, and
started."""

from __future__ import annotations

import copy
import http.client
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

if TYPE_CHECKING:
    from tests.conftest import Headrace

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZED = ("base", *(f"overlays/{path.name}" for path in sorted((DEPLOY / "kubernetes/overlays").iterdir())))
#: Values of the chart that change what it renders.
VALUES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "claim": (
        "models.claim=shared",
        "autoscaling.by=cpu",
        "gpus=2",
        "nodeSelector.disk=ssd",
        "rollingUpdate.maxUnavailable=1",
        "rollingUpdate.maxSurge=0",
        "topologySpreadConstraints[0].maxSkew=1",
        "topologySpreadConstraints[0].topologyKey=kubernetes.io/hostname",
        "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
        "tolerations[0].key=nvidia.com/gpu",
        "tolerations[0].operator=Exists",
    ),
    "cloud": (
        "models.url=s3://a/b",
        "autoscaling.by=queue",
        "serviceMonitor.enabled=true",
        "serviceMonitor.labels.release=prometheus",
        "args={--strict-readiness=true}",
    ),
    "credentials": (
        "env[0].name=GOOGLE_APPLICATION_CREDENTIALS",
        "env[0].value=/secrets/key.json",
        "envFrom[0].secretRef.name=s",
        "volumes[0].name=key",
        "volumes[0].secret.secretName=gcs",
        "volumeMounts[0].name=key",
        "volumeMounts[0].mountPath=/secrets",
        "volumeMounts[0].readOnly=true",
        "serviceAccountName=headrace-s3",
        "imagePullSecrets[0].name=registry",
        "podAnnotations.a=b",
    ),
}
RENDERED = [*(("kustomize", name) for name in KUSTOMIZED), *(("helm", name) for name in VALUES)]
#: Kinds of KEDA and of the Prometheus operator, whose schemas are not part of Kubernetes.
FOREIGN = ("ScaledObject", "ServiceMonitor")
HELM = Path(sys.executable).with_name("helm")


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def helm(*values: str) -> str:
    return run(HELM, "template", "headrace", DEPLOY / "helm/headrace", *[f"--set={value}" for value in values])


@cache
def _rendered(tool: str, name: str) -> str:
    return helm(*VALUES[name]) if tool == "helm" else run("kubectl", "kustomize", DEPLOY / "kubernetes" / name)


def render(tool: str, name: str) -> dict[str, Any]:
    """Return the objects by their kind."""
    if tool == "kustomize" and shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    objects = [each for each in yaml.safe_load_all(_rendered(tool, name)) if each]
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def container(objects: dict[str, Any]) -> dict[str, Any]:
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize(("tool", "name"), RENDERED)
def test_objects_follow_the_schemas_of_kubernetes(tool: str, name: str) -> None:
    for kind, found in render(tool, name).items():
        if kind not in FOREIGN:
            kubernetes_validate.validate(found, "1.32", strict=True)


def test_the_container_of_kserve_follows_the_schemas_of_kubernetes() -> None:
    """The rest of the runtime: tests/kserve."""
    runtime = yaml.safe_load((DEPLOY / "kserve/cluster-serving-runtime.yaml").read_text(encoding="utf-8"))
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    pod["spec"] = {"containers": runtime["spec"]["containers"]}
    kubernetes_validate.validate(pod, "1.32", strict=True)


@pytest.mark.parametrize(("tool", "name"), RENDERED)
def test_selectors_and_references_find_the_pods(tool: str, name: str) -> None:
    objects = render(tool, name)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["name"] for port in container(objects)["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} <= ports
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert objects[kind]["spec"]["selector"]["matchLabels"].items() <= labels
    assert objects["Service"]["spec"]["selector"].items() <= labels
    for kind in {"HorizontalPodAutoscaler", "ScaledObject"} & objects.keys():
        assert objects[kind]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
        assert "replicas" not in objects["Deployment"]["spec"], "each rollout would undo the scaling"
    if monitor := objects.get("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert wanted <= objects["Service"]["metadata"]["labels"].items()
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {
            port["name"] for port in objects["Service"]["spec"]["ports"]
        }


@pytest.mark.parametrize(("tool", "name"), RENDERED)
def test_a_pod_has_the_termination_time_of_its_server(tool: str, name: str) -> None:
    objects = render(tool, name)
    (timeout,) = [word for word in container(objects)["args"] if word.startswith("--exit-timeout-secs=")]
    pause_s = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= pause_s + int(timeout.partition("=")[2]) + 5


def test_the_commands_of_the_page_run_in_a_clone() -> None:
    page = (DEPLOY.parent / "docs/kubernetes.md").read_text(encoding="utf-8")
    commands = "".join(re.findall("^```sh$(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert not re.findall("^cd .*", commands, re.MULTILINE), "the next command would run elsewhere"
    folders = re.findall(r"deploy/[\w/]+", commands)
    assert len(folders) >= 3
    assert [name for name in folders if not (DEPLOY.parent / name).is_dir()] == []


def test_the_chart_renders_the_kustomize_base() -> None:
    """But for Helm's own labels, and the tag of the image."""
    base, chart = render("kustomize", "base"), copy.deepcopy(render("helm", "defaults"))

    def drop(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else ():
            if key == "helm.sh/chart" or (key.startswith("app.kubernetes.io/") and not key.endswith("/name")):
                del value[key]
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            drop(each)

    drop(chart)
    assert chart["Service"]["spec"].pop("type") == "ClusterIP"
    assert container(chart)["image"] == "headrace:0.1.0"
    found = chart["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    found["image"] = "headrace"
    assert found.pop("imagePullPolicy") == "IfNotPresent"
    assert chart == base


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("models.claim=a", "models.url=s3://b/c"), "a pod has one model repository"),
        (("args={--http-port=9000}",), "args has '--http-port=9000', .*: the Service and the probes use 8000"),
        (("args={--exit-timeout-secs=60}",), "args has '--exit-timeout-secs=60', .*: set exitTimeout"),
        (
            ("autoscaling.by=cpu", "autoscaling.minReplicas=11"),
            "autoscaling.minReplicas is 11, above maxReplicas, 10",
        ),
        (
            (
                "autoscaling.by=cpus",
                "replicas=-1",
                "exitTimeout=-1",
                "replicsa=3",
                "image.repository=",
                "image.tag=2",
                "models.url=bucket",
                "gpus=x",
                "podAnnotations.a=true",
                "service=null",
            ),
            (
                r"(?s)(?=.*\(root\): Additional property replicsa is not allowed)(?=.*replicas: Must be greater than)"
                r"(?=.*exitTimeout: Must be greater)(?=.*image.repository: String length must be greater)"
                r"(?=.*image.tag: Invalid type. Expected: string)(?=.*models.url: Does not match)"
                r"(?=.*gpus: Invalid type. Expected: integer)(?=.*podAnnotations.a: Invalid type. Expected: string)"
                r"(?=.*service is required)(?=.*autoscaling.by must be one of .* \"none\", \"cpu\", \"queue\")"
            ),
        ),
    ],
)
def test_wrong_values_are_refused(values: Sequence[str], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        helm(*values)


def test_names_and_labels_stay_texts() -> None:
    """A release may be called 123, and a claim, too."""
    words: list[str | Path] = [HELM, "template", "123", DEPLOY / "helm/headrace", "--set-string=models.claim=456"]
    for found in yaml.safe_load_all(run(*words)):
        kubernetes_validate.validate(found, "1.32", strict=True)


def test_helm_finds_no_fault() -> None:
    assert "0 chart(s) failed" in run(HELM, "lint", "--strict", DEPLOY / "helm/headrace")


def test_the_command_of_the_pod_serves_and_stops_cleanly(keep_serving: Callable[..., Headrace], tmp_path: Path) -> None:
    pod = container(render("helm", "defaults"))
    program, command, *flags = pod["args"]
    assert (program, command) == ("headrace", "serve")
    server = keep_serving(*[flag.replace("/models", str(tmp_path)) for flag in flags])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=10)
        connection.request("GET", pod[probe]["httpGet"]["path"])
        assert connection.getresponse().status == 200, probe
        connection.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
