"""The manifests and the code agree: ports, health names, settings, drain times, models."""

from __future__ import annotations

import tomllib
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from deploy.manifests import FOLDER, LAYERS, Manifest, faults, render
from draft_service.main import DraftService
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.health import is_serving
from eagle_pangu.serving.settings import DraftSettings, ServerSettings, Settings
from eagle_pangu.speculation.models import RELEASES
from orchestrator.main import OrchestratorService
from teacher_service.main import TeacherService

SERVICES = {"teacher": TeacherService, "draft": DraftService, "orchestrator": OrchestratorService}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
CPU, ASCEND = FOLDER / "overlays" / "cpu", FOLDER / "overlays" / "ascend"
CARD = "huawei.com/Ascend910"

each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
each_overlay = pytest.mark.parametrize("layer", [CPU, ASCEND], ids=lambda layer: layer.name)
each_service = pytest.mark.parametrize("name", SERVICES)


@cache
def rendered(layer: Path) -> list[Manifest]:
    return render(layer)


def the(kind: str, name: str, layer: Path = CPU) -> Manifest:
    """The one resource of that kind whose name begins so (ConfigMaps end in a hash)."""
    [found] = [m for m in rendered(layer) if m["kind"] == kind and m["metadata"]["name"].startswith(name)]
    return found


def pod(name: str, layer: Path = CPU) -> dict[str, Any]:
    return the("Deployment", name, layer)["spec"]["template"]["spec"]


def container(name: str, layer: Path = CPU) -> dict[str, Any]:
    [only] = pod(name, layer)["containers"]
    return only


def settings_of(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, layer: Path = CPU
) -> tuple[Settings, ServerSettings]:
    """What the container would read: the mounted file and its environment."""
    environment = {variable["name"]: variable["value"] for variable in container(name, layer)["env"]}
    configuration = folder / "config.toml"
    configuration.write_text(the("ConfigMap", "configuration", layer)["data"]["config.toml"])
    for variable, value in (environment | {"EAGLE_PANGU_CONFIG": str(configuration)}).items():
        monkeypatch.setenv(variable, value)
    settings = load_settings(section=name)
    return settings, getattr(settings, name)


@each_layer
def test_every_layer_is_valid_for_the_kubernetes_versions_we_name(layer: Path) -> None:
    assert [fault for manifest in rendered(layer) for fault in faults(manifest)] == []


def test_an_unknown_field_is_a_fault() -> None:
    misspelt = the("Service", "teacher") | {"spec": {"clusterIp": "None"}}
    assert any("clusterIp" in fault for fault in faults(misspelt))


@each_layer
@each_service
def test_selectors_match_the_labels_of_their_own_pods_only(name: str, layer: Path) -> None:
    for selector in (
        the("Service", name, layer)["spec"]["selector"],
        the("Deployment", name, layer)["spec"]["selector"]["matchLabels"],
    ):
        selected = [
            other
            for other in SERVICES
            if selector.items() <= the("Deployment", other, layer)["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert selected == [name]


@each_overlay
@each_service
def test_the_container_reads_its_settings_and_listens_where_the_service_points(
    name: str, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings = settings_of(name, tmp_path, monkeypatch, layer)
    [port] = container(name, layer)["ports"]
    [service_port] = the("Service", name, layer)["spec"]["ports"]
    assert settings.host == "0.0.0.0"
    assert settings.port == port["containerPort"] == service_port["port"]
    assert service_port["targetPort"] == port["name"]


def test_every_value_of_the_configuration_file_is_a_settings_field() -> None:
    for section, values in tomllib.loads(the("ConfigMap", "configuration")["data"]["config.toml"]).items():
        fields = Settings.model_fields[section].annotation.model_fields
        assert values.keys() <= fields.keys(), section


@each_overlay
@each_service
def test_the_configuration_is_mounted_where_the_variable_says(name: str, layer: Path) -> None:
    environment = {variable["name"]: variable["value"] for variable in container(name, layer)["env"]}
    file = Path(environment["EAGLE_PANGU_CONFIG"])
    [volume] = [v for v in pod(name, layer)["volumes"] if v.get("configMap")]
    [mount] = [m for m in container(name, layer)["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["mountPath"] == str(file.parent)
    assert file.name in the("ConfigMap", volume["configMap"]["name"], layer)["data"]


@each_overlay
@each_service
def test_probes_ask_for_health_that_the_service_answers(name: str, layer: Path) -> None:
    [port] = container(name, layer)["ports"]
    asked = {probe: container(name, layer)[probe]["grpc"] for probe in PROBES}
    assert {grpc["port"] for grpc in asked.values()} == {port["containerPort"]}
    for probe in ("startupProbe", "readinessProbe"):
        assert asked[probe]["service"] in SERVICES[name].service_names
    assert "service" not in asked["livenessProbe"]  # the process as a whole


async def test_the_probes_of_the_draft_are_answered_by_a_running_draft() -> None:
    async with running(DraftService(DraftSettings())) as port:
        connection = channel(f"127.0.0.1:{port}", ServerSettings())
        for probe in PROBES:
            assert await is_serving(connection, container("draft")[probe]["grpc"].get("service", ""))
        await connection.close()


@each_overlay
@each_service
def test_the_grace_period_covers_the_drain(
    name: str, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings = settings_of(name, tmp_path, monkeypatch, layer)
    before = container(name, layer)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(name, layer)["terminationGracePeriodSeconds"] >= before + settings.drain_seconds + 5


@each_overlay
@each_service
def test_no_variable_is_injected_that_would_stop_the_start(name: str, layer: Path) -> None:
    assert pod(name, layer)["enableServiceLinks"] is False


def test_the_orchestrator_finds_both_backends_by_headless_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = settings_of("orchestrator", tmp_path, monkeypatch)
    for name, target in (("teacher", settings.orchestrator.teacher), ("draft", settings.orchestrator.draft)):
        spec = the("Service", name)["spec"]
        assert spec["clusterIP"] == "None"
        assert target == f"dns:///{name}:{spec['ports'][0]['port']}"
    assert "clusterIP" not in the("Service", "orchestrator")["spec"]


@pytest.mark.parametrize(
    ("name", "layer", "setting"),
    [("teacher", CPU, "teacher.model"), ("teacher", ASCEND, "teacher.model"), ("draft", ASCEND, "draft.embeddings")],
)
def test_the_model_that_a_service_reads_is_pulled_before(
    name: str, layer: Path, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = settings_of(name, tmp_path, monkeypatch, layer)
    model = attrgetter(setting)(settings)
    [init] = pod(name, layer)["initContainers"]
    assert init["command"] == ["eagle-pangu", "models", "pull", model]
    assert model in RELEASES
    homes = [
        {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}["models"]
        for each in (init, container(name, layer))
    ]
    assert homes[0] == homes[1]
    for image in (init["image"], container(name, layer)["image"]):
        file = image.partition(":")[0].removeprefix("eagle-pangu-") + ".Dockerfile"
        assert f"EAGLE_PANGU_HOME={homes[0]}" in (FOLDER / "docker" / file).read_text()


def test_teacher_and_draft_have_an_ascend_card_each_and_wait_for_the_old_pods_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("teacher", "draft"):
        settings, _ = settings_of(name, tmp_path, monkeypatch, ASCEND)
        assert getattr(settings, name).device == "npu"
        resources = container(name, ASCEND)["resources"]
        assert resources["limits"][CARD] == resources["requests"][CARD] == "1"
        assert container(name, ASCEND)["image"].startswith(f"eagle-pangu-{name}-ascend:")
        assert the("Deployment", name, ASCEND)["spec"]["strategy"] == {"type": "Recreate"}
        # Only the container that computes has a card: the one that pulls the model must not load torch_npu.
        for init in pod(name, ASCEND)["initContainers"]:
            assert CARD not in init["resources"]["limits"]
            assert "ascend" not in init["image"]
    assert settings.draft.drafter == "hybrid"
    assert CARD not in container("orchestrator", ASCEND)["resources"]["limits"]


def test_on_cpu_a_model_has_as_many_threads_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("teacher", "draft"):
        settings, _ = settings_of(name, tmp_path, monkeypatch)
        section = getattr(settings, name)
        assert section.device == "cpu"
        assert section.threads == int(container(name)["resources"]["limits"]["cpu"])


@each_overlay
@each_service
def test_every_pod_meets_the_restricted_standard(name: str, layer: Path) -> None:
    spec = pod(name, layer)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    the("ServiceAccount", spec["serviceAccountName"], layer)
    for each in [*spec.get("initContainers", []), *spec["containers"]]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
        assert "memory" in each["resources"]["limits"]
        assert "/tmp" in {mount["mountPath"] for mount in each["volumeMounts"]}
    namespace = the("Namespace", "eagle-pangu", layer)["metadata"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {m["metadata"].get("namespace", namespace["name"]) for m in rendered(layer)} == {namespace["name"]}
