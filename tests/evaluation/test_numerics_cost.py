"""The cost of bitwise numerics, measured on a tiny model: every shape once, medians and their ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eagle_pangu.cli.bench_numerics import bench_numerics
from tests.models import tiny_llama

app = typer.Typer()
app.command()(bench_numerics)


def test_every_context_and_number_of_rows_is_measured_under_both_policies(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    arguments = ["--model", str(tiny_llama(tmp_path / "model")), "--dtype", "float32", "--threads", "1"]
    shapes = ["--contexts", "200,64", "--rows", "1,4", "--repeats", "2", "--output", str(output)]
    result = CliRunner().invoke(app, [*arguments, *shapes], catch_exceptions=False)
    if "invariance" in result.output:
        pytest.skip("no invariance class in float32 on this machine")
    assert result.exit_code == 0, result.output
    content = json.loads(output.read_text(encoding="utf-8"))
    assert [(cost["context"], cost["rows"]) for cost in content["costs"]] == [(64, 1), (64, 4), (200, 1), (200, 4)]
    for cost in content["costs"]:
        assert cost["bitwise_ms"] > 0
        assert cost["ratio"] == pytest.approx(cost["bitwise_ms"] / cost["free_ms"])
    assert content["versions"]["torch"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "256,x"], "contexts"),
        (["--rows", "0"], "rows"),
        (["--dtype", "float8"], "dtype"),
        (["--model", "missing"], "missing"),
    ],
)
def test_a_bad_flag_ends_with_its_name(tmp_path: Path, flags: list[str], message: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["--model", str(model), *flags], catch_exceptions=False)
    assert result.exit_code == 1
    assert message in result.output
