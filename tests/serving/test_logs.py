"""Logs are one JSON object a line, whoever writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from eagle_pangu.serving.logs import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_library_logs_through_the_same_chain_with_the_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "teacher")
    structlog.contextvars.bind_contextvars(request_id="r1")
    get_logger("ours").info("round", rows=3)
    logging.getLogger("theirs").warning("careful: %s", "hot")
    ours, theirs = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["rows"], ours["logger"], ours["level"]) == ("round", 3, "ours", "info")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("careful: hot", "theirs", "warning")
    assert {line["service"] for line in (ours, theirs)} == {"teacher"}
    assert {line["request_id"] for line in (ours, theirs)} == {"r1"}


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "teacher")
    get_logger("ours").info("quiet")
    assert capsys.readouterr().err == ""
