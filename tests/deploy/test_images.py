"""Each Dockerfile builds from files that exist and starts a console script as the user that the pod demands.

No container engine is assumed: the recipes are read, not run.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from eagle_pangu.doctor.compatibility import CANN_OF_TORCH_NPU
from eagle_pangu.serving.settings import Settings
from tests.deploy.test_manifests import ASCEND, CPU, container, pod

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SERVICES = ("teacher", "draft", "orchestrator")
ON_ASCEND = ("teacher-ascend", "draft-ascend")

each_image = pytest.mark.parametrize("name", [*SERVICES, *ON_ASCEND])


def service_of(name: str) -> str:
    return name.removesuffix("-ascend")


def install(name: str) -> str:
    [only] = [rest for instruction, rest in instructions(name) if instruction == "RUN" and "pip install" in rest]
    return only


def instructions(name: str) -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(instruction, " ".join(rest.split())) for instruction, _, rest in lines]


def final_stage(name: str) -> dict[str, str]:
    every = instructions(name)
    start = max(number for number, (instruction, _) in enumerate(every) if instruction == "FROM")
    return dict(every[start:])


@each_image
def test_what_is_copied_exists(name: str) -> None:
    copied = [rest.split()[:-1] for instruction, rest in instructions(name) if instruction == "COPY"]
    ours = [each for each in copied if not each[0].startswith("--from")]
    sources = {source for each in ours for source in each if not source.startswith("--")}
    assert {"pyproject.toml", "constraints.txt", "protos", "eagle_pangu"} < sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


@each_image
def test_an_image_holds_its_own_service_only(name: str) -> None:
    copied = {rest for instruction, rest in instructions(name) if instruction == "COPY"}
    packages = {each.split()[0] for each in copied} & {"teacher_service", "draft_service", "orchestrator"}
    service = service_of(name)
    assert packages == {service if service == "orchestrator" else f"{service}_service"}


@each_image
def test_the_entry_point_is_a_console_script_on_the_port_of_the_settings(name: str) -> None:
    final = final_stage(name)
    *before, script = json.loads(final["ENTRYPOINT"])
    assert before == (["with-cann"] if name in ON_ASCEND else [])
    assert script == f"eagle-pangu-{service_of(name)}"
    assert script in PROJECT["scripts"]
    assert int(final["EXPOSE"]) == getattr(Settings(), service_of(name)).port


@each_image
def test_the_image_runs_as_the_user_of_the_pod(name: str) -> None:
    user, group = final_stage(name)["USER"].split(":")
    layer = ASCEND if name in ON_ASCEND else CPU
    security = pod(service_of(name), layer)["securityContext"]
    assert (int(user), int(group)) == (security["runAsUser"], security["runAsGroup"])
    assert int(user) > 0
    assert container(service_of(name), layer)["image"].startswith(f"eagle-pangu-{name}:")


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_services_with_a_model_install_torch(name: str) -> None:
    assert "--constraint constraints.txt" in install(name)
    assert ("[models]" in install(name)) == (name != "orchestrator")
    assert not any(requirement.startswith("torch") for requirement in PROJECT["dependencies"])


@pytest.mark.parametrize("name", ON_ASCEND)
def test_an_ascend_image_takes_torch_from_the_extra_and_all_else_from_the_constraints(name: str) -> None:
    [made] = [rest for instruction, rest in instructions(name) if instruction == "RUN" and "sed" in rest]
    assert made == "sed '/^torch==/d' constraints.txt > ascend-constraints.txt"
    assert "--constraint ascend-constraints.txt" in install(name)
    assert '".[npu]"' in install(name)
    asked = PROJECT["optional-dependencies"]["npu"]
    [torch] = [each.removeprefix("torch==") for each in asked if each.startswith("torch==")]
    [torch_npu] = [each.removeprefix("torch-npu==") for each in asked if each.startswith("torch-npu==")]
    assert torch_npu.startswith(torch)
    [base] = [rest for instruction, rest in instructions(name) if instruction == "ARG" and "CANN_IMAGE" in rest]
    assert f"cann:{CANN_OF_TORCH_NPU[torch_npu]}-" in base


@each_image
def test_build_and_final_stage_share_one_python(name: str) -> None:
    stages = [rest.split()[0] for instruction, rest in instructions(name) if instruction == "FROM"]
    assert stages == ["${CANN_IMAGE}" if name in ON_ASCEND else "python:${PYTHON_VERSION}-slim"] * 2


def run_with_cann(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """The script that starts an Ascend container, with its absolute paths below `root`."""
    script = root / "with-cann"
    text = (ROOT / "deploy" / "docker" / "with-cann.sh").read_text()
    script.write_text(text.replace("/usr/local/Ascend", str(root)))
    return subprocess.run(["bash", script, *command], capture_output=True, text=True)


@pytest.mark.parametrize("folder", ["cann", "ascend-toolkit"])
def test_a_command_runs_with_the_environment_of_cann(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "set_env.sh").write_text("export ASCEND_HOME_PATH=/here\n")
    result = run_with_cann(tmp_path, "bash", "-c", 'echo "$ASCEND_HOME_PATH $LD_LIBRARY_PATH"; exit 7')
    assert result.returncode == 7
    assert result.stdout.startswith(f"/here {tmp_path}/driver/lib64:")


def test_without_cann_a_container_does_not_start(tmp_path: Path) -> None:
    result = run_with_cann(tmp_path, "echo", "started")
    assert (result.returncode, result.stdout) == (1, "")
    assert "is this a CANN image" in result.stderr
