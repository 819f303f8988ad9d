"""Which failures of an import are laid to torch_npu."""

from __future__ import annotations

import pytest

from eagle_pangu.serving.torch_failures import explanation

EXTENSION = "Failed to load the backend extension: {}. You can disable extension auto-loading with"


def raised(code: str, module: str) -> BaseException:
    """What a module of that name raises when it is imported."""
    with pytest.raises(BaseException) as error:  # noqa: PT011 - whatever it is
        exec(code, {"__name__": module})
    return error.value


def test_torch_says_so_itself() -> None:
    error = RuntimeError(EXTENSION.format("torch_npu"))
    error.__cause__ = RuntimeError("the driver is too old")
    assert "cannot be loaded (the driver is too old)" in str(explanation(error))


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_an_import_ended_inside_the_package(kind: str) -> None:
    error = raised(f"raise {kind}('libhccl.so: cannot open')", "torch_npu.npu")
    assert "cannot be loaded (libhccl.so: cannot open)" in str(explanation(error))


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
        raised("raise ValueError('not of an import')", "torch_npu"),
    ],
)
def test_any_other_error_is_not(error: BaseException) -> None:
    assert explanation(error) is None
