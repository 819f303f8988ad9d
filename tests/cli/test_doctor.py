"""`eagle-pangu doctor` as a user sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from click.testing import Result as Run
from typer.testing import CliRunner

from eagle_pangu.cli import doctor as command
from eagle_pangu.cli.main import app
from eagle_pangu.doctor.results import Result

OK, SKIPPED, FAILED = (
    Result("one", "ok", "fine [x]"),
    Result("two", "not checked", "none"),
    Result("three", "failed", "y"),
)


def call(*arguments: str) -> Run:
    return CliRunner().invoke(app, ["doctor", *arguments])


def finding(monkeypatch: pytest.MonkeyPatch, *results: Result) -> list[tuple[Sequence[str], str]]:
    """Let the examination give these; returns what it will have been asked."""
    asked = []

    def examine(devices: Sequence[str], model: str) -> Iterator[Result]:
        asked.append((devices, model))
        yield from results

    monkeypatch.setattr(command, "examine", examine)
    return asked


def test_every_result_is_a_line_and_nothing_failed_is_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = finding(monkeypatch, OK, SKIPPED)
    result = call()
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["ok           one: fine [x]", "not checked  two: none"]
    assert asked == [((), "smollm2-135m-instruct")]


def test_a_failure_is_status_1_and_named_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = finding(monkeypatch, FAILED, OK)
    result = call("--device", "npu", "--model", "dir")
    assert result.exit_code == 1
    assert "failed: three" in result.stderr
    assert asked == [(("npu",), "dir")]


@pytest.mark.parametrize(("results", "status"), [((OK,), 0), ((FAILED, SKIPPED), 1)])
def test_json_holds_every_result(results: tuple[Result, ...], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    finding(monkeypatch, *results)
    result = call("--json")
    assert result.exit_code == status
    document = json.loads(result.stdout)
    assert document["results"] == [each._asdict() for each in results]
    assert document["failed"] == [each.name for each in results if each.status == "failed"]


def test_an_unknown_device_is_refused() -> None:
    assert call("--device", "tpu").exit_code == 2


def test_on_this_machine_it_runs_to_the_end_and_speaks_of_the_npu() -> None:
    document = json.loads(call("--json").stdout)
    status = {result["name"]: result["status"] for result in document["results"]}
    assert {"python", "packages", "cann", "import torch", "cpu: indices", "npu: device", "npu: row counts"} <= set(
        status
    )
    assert status["import torch"] == status["cpu: attention"] == status["cpu: products"] == "ok"
