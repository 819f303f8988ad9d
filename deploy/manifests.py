"""Build every Kustomize layer and validate it against the Kubernetes schemas: `python -m deploy.manifests`.

Offline: no cluster is asked. It knows schemas only; what the manifests and the code must agree on (ports, health names,
settings, drain times) is asserted by tests/deploy. Needs the `dev` extra and kubectl ($KUBECTL, or make's own).
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

FOLDER = Path(__file__).resolve().parent
LAYERS = [FOLDER / "base", *sorted(path.parent for path in FOLDER.glob("overlays/*/kustomization.yaml"))]
KUBERNETES = ("1.33", "1.35", "1.37")

Manifest = dict[str, Any]


def render(layer: Path) -> list[Manifest]:
    """The resources of one layer, as `kubectl apply -k` would send them.

    Raises:
        subprocess.CalledProcessError: the layer does not build.
    """
    kubectl = os.environ.get("KUBECTL") or FOLDER.parent / ".venv" / "tools" / "kubectl"
    built = subprocess.run([kubectl, "kustomize", layer], check=True, stdout=subprocess.PIPE, text=True)
    return list(yaml.safe_load_all(built.stdout))


def faults(manifest: Manifest) -> list[str]:
    """What the strict schemas say against one resource; unknown fields are faults."""
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(str(part) for part in error.path)
            found.append(f"{manifest['kind']} {manifest['metadata']['name']} ({version}) {place}: {error.message}")
    return found


def main() -> None:
    """Print one line a layer; exit with 1 when anything is at fault."""
    wrong = 0
    for layer in LAYERS:
        manifests = render(layer)
        problems = [fault for manifest in manifests for fault in faults(manifest)]
        wrong += len(problems)
        verdict = "\n  ".join(problems) or f"{len(manifests)} resources, valid for Kubernetes {', '.join(KUBERNETES)}"
        sys.stdout.write(f"{layer.relative_to(FOLDER.parent)}: {verdict}\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
