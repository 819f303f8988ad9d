"""The shape of the house: what imports without torch, and that dependencies point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("teacher_service", "draft_service", "orchestrator")
OURS = ("protos", "eagle_pangu", *SERVICES)

IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

BANNED = {"torch", "transformers", "safetensors", "gguf", "accelerate"}

class Banned(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BANNED:
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Banned())
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    print(importlib.import_module(module.name).__name__)
assert not BANNED & set(sys.modules)
"""


def import_all(package: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", IMPORT_ALL, package], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "package",
    [
        "protos",
        "orchestrator",
        "eagle_pangu.serving",
        "eagle_pangu.client",
        "eagle_pangu.openai_api",
        *(f"eagle_pangu.speculation.{name}" for name in ("tree", "parameters", "noise", "history")),
    ],
)
def test_these_import_every_module_without_torch(package: str) -> None:
    result = import_all(package)
    assert result.returncode == 0, result.stderr


def test_the_ban_on_torch_bites() -> None:
    result = import_all("eagle_pangu.speculation")
    assert result.returncode != 0
    assert "torch is imported" in result.stderr


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(module, what it imports) for every import statement below the package, also those inside functions."""
    for file in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative import"
                yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


def trespasses(package: str, *forbidden: str) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, name in imports(package)
        if any(name == banned or name.startswith(f"{banned}.") for banned in forbidden)
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service: str) -> None:
    assert trespasses(service, *(other for other in SERVICES if other != service)) == []


def test_the_library_imports_no_service() -> None:
    assert trespasses("eagle_pangu", *SERVICES) == []


def test_the_wire_contract_imports_nothing_else_of_ours() -> None:
    assert trespasses("protos", *(package for package in OURS if package != "protos")) == []


def test_the_core_knows_neither_messages_nor_grpc_nor_the_layers_above() -> None:
    above = (f"eagle_pangu.{layer}" for layer in ("serving", "client", "evaluation", "cli"))
    assert trespasses("eagle_pangu.speculation", "grpc", "protos.v1", "protos.codec", *above) == []


def test_serving_knows_no_model_and_no_layer_above() -> None:
    above = (f"eagle_pangu.{layer}" for layer in ("speculation", "client", "evaluation", "cli"))
    assert trespasses("eagle_pangu.serving", *above) == []


def test_no_package_imports_the_tests() -> None:
    assert [trespass for package in OURS for trespass in trespasses(package, "tests")] == []
