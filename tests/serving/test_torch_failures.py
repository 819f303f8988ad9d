"""Which failures of an import are laid to torch_npu."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_pangu.serving.torch_failures import explanation

EXTENSION = "Failed to load the backend extension: {}. You can disable extension auto-loading with"


def raised(code: str, module: str) -> BaseException:
    """What a module of that name raises when it is imported."""
    with pytest.raises(BaseException) as error:  # noqa: PT011 - whatever it is
        exec(code, {"__name__": module})
    return error.value


def raised_by_a_call(module: str) -> BaseException:
    """What a function of a module of that name raises after the import."""
    names: dict[str, Any] = {"__name__": module}
    exec("def call():\n  raise ValueError('not of an import')", names)
    with pytest.raises(ValueError, match="not of an import") as error:
        names["call"]()
    return error.value


def test_torch_says_so_itself() -> None:
    error = RuntimeError(EXTENSION.format("torch_npu"))
    error.__cause__ = RuntimeError("the driver is too old")
    assert "cannot be loaded (the driver is too old)" in str(explanation(error))


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_an_import_ended_inside_the_package(kind: str) -> None:
    error = raised(f"raise {kind}('libhccl.so: cannot open')", "torch_npu.npu")
    assert "cannot be loaded (libhccl.so: cannot open)" in str(explanation(error))


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("assert False, 'broken'", "AssertionError: broken"),
        ("{}['ASCEND']", "KeyError: 'ASCEND'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise OSError", "OSError: "),
    ],
)
def test_whatever_ends_an_import_inside_the_package_is_laid_to_it(statement: str, said: str) -> None:
    assert f"cannot be loaded ({said})" in str(explanation(raised(statement, "torch_npu.npu")))


@pytest.mark.parametrize(("package", "is_laid_to_it"), [("torch_npu", True), ("another", False)])
def test_a_module_that_is_no_python_is_laid_to_its_package(package: str, is_laid_to_it: bool) -> None:
    with pytest.raises(SyntaxError) as error:
        compile("def (", f"/site-packages/{package}/__init__.py", "exec")
    assert (explanation(error.value) is not None) is is_laid_to_it


def test_what_was_raised_from_it_is_laid_to_it_too() -> None:
    error = RuntimeError("Failed to import transformers.modeling_utils")
    error.__cause__ = raised("raise ImportError('libhccl.so: cannot open')", "torch_npu")
    assert "libhccl.so" in str(explanation(error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(EXTENSION.format("another")),
        ImportError("No module named 'torch'"),
        RuntimeError("torch_npu is mentioned"),
        raised_by_a_call("torch_npu"),
    ],
)
def test_any_other_error_is_not(error: BaseException) -> None:
    assert explanation(error) is None
