"""The checked-in stubs are what the .proto files say today."""

from pathlib import Path

from protos.generate import PROTO_DIRECTORY, generate

STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for pattern in STUBS for path in folder.glob(pattern)}


def test_checked_in_stubs_equal_freshly_generated_ones(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh, checked_in = stubs(tmp_path / "protos" / "v1"), stubs(PROTO_DIRECTORY)
    assert len(fresh) == len(STUBS) * len(list(PROTO_DIRECTORY.glob("*.proto")))
    assert checked_in.keys() == fresh.keys()
    different = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not different, "run `make protos`"
