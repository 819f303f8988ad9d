"""Write the Python stubs beside the .proto files: `python -m protos.generate [--output DIR]`.

Needs the `dev` extra (grpcio-tools, mypy-protobuf). A test runs it into a temporary folder and compares.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIRECTORY = ROOT / "protos" / "v1"


def generate(output: Path) -> None:
    """Generate messages, services and type stubs of every .proto below `output`/protos/v1."""
    from grpc_tools import protoc

    # protoc looks for the mypy plugins on PATH; they lie beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = sorted(str(path.relative_to(ROOT)) for path in PROTO_DIRECTORY.glob("*.proto"))
    arguments = ["protoc", f"-I{ROOT}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    arguments += [f"--{kind}_out={output}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main([*arguments, *files]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT)
    generate(parser.parse_args().output)
