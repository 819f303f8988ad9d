"""What is read of versions and of Ascend's files, with faults put into both."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from eagle_pangu.doctor import ascend_host, examination, torch_import, versions
from eagle_pangu.doctor.results import CheckFailedError, NotCheckedError, Result, run_check

MATCHING = {"torch": "2.12.0+cpu", "torch-npu": "2.12.0"}


def by_name(results: Iterable[Result]) -> dict[str, Result]:
    return {result.name: result for result in results}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of files: /dev, the driver's version and CANN, all of which a test may change."""
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "driver.info").write_text("Version=25.3.rc1\nascendhal_version=7.35\n")
    (tmp_path / "cann" / "aarch64-linux").mkdir(parents=True)
    installed = "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001\n"
    (tmp_path / "cann" / "aarch64-linux" / "ascend_toolkit_install.info").write_text(installed)
    monkeypatch.setattr(ascend_host, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(ascend_host, "DRIVER", tmp_path / "driver.info")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    pretend(monkeypatch, **MATCHING)
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, **packages: str | None) -> None:
    """Versions of packages that are installed, and None for one that is not; the others are as they are."""
    pretended = {name.replace("_", "-"): number for name, number in packages.items()}
    real = versions.installed

    def installed(package: str) -> str | None:
        return pretended[package] if package in pretended else real(package)

    monkeypatch.setattr(versions, "installed", installed)
    monkeypatch.setattr(ascend_host, "installed", installed)


def host_results() -> dict[str, Result]:
    return by_name(ascend_host.check_ascend_host())


def version_results() -> dict[str, Result]:
    return by_name(versions.check_versions())


def test_a_host_with_everything_is_described(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    results = host_results()
    assert {result.status for result in results.values()} == {"ok"}
    assert results["ascend devices"].text == "davinci0, davinci1; ASCEND_RT_VISIBLE_DEVICES = 1"
    assert results["ascend driver"].text == "driver 25.3.rc1"
    assert results["cann"].text.startswith("CANN 9.1.0 (")
    assert version_results()["torch_npu version"].text.endswith("it belongs to CANN 9.1.0")


def test_a_card_without_its_managers_is_a_fault(host: Path) -> None:
    (host / "dev" / "hisi_hdc").unlink()
    result = host_results()["ascend devices"]
    assert (result.status, "/dev/hisi_hdc" in result.text) == ("failed", True)


def test_a_card_without_a_readable_driver_is_a_fault(host: Path) -> None:
    (host / "driver.info").unlink()
    assert host_results()["ascend driver"].status == "failed"


def test_without_a_card_nothing_is_asked_of_the_driver(host: Path) -> None:
    for card in ("davinci0", "davinci1"):
        (host / "dev" / card).unlink()
    results = host_results()
    assert [results[name].status for name in ("ascend devices", "ascend driver")] == ["not checked"] * 2


@pytest.mark.parametrize(
    ("number", "said"), [("8.5.0", "CANN 8.5.0"), ("9.0.0", "torch_npu 2.12.0 belongs to CANN 9.1.0")]
)
def test_another_cann_than_that_of_torch_npu_is_a_fault(host: Path, number: str, said: str) -> None:
    (host / "cann" / "aarch64-linux" / "ascend_toolkit_install.info").write_text(f"version={number}\n")
    result = host_results()["cann"]
    assert (result.status, said in result.text) == ("failed", True)


def test_cann_is_found_where_other_releases_say_their_version(host: Path) -> None:
    (host / "cann" / "aarch64-linux" / "ascend_toolkit_install.info").unlink()
    (host / "cann" / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[9.1.0:CANN-9.1]\n")
    assert host_results()["cann"].text.startswith("CANN 9.1.0 (")


def test_cann_that_is_not_there_is_a_fault_where_torch_npu_is(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "cann" / "aarch64-linux" / "ascend_toolkit_install.info").unlink()
    assert host_results()["cann"].status == "failed"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    result = host_results()["cann"]
    assert (result.status, "set_env.sh" in result.text) == ("failed", True)
    pretend(monkeypatch, torch_npu=None)
    assert host_results()["cann"].status == "not checked"


@pytest.mark.parametrize(
    ("torch", "torch_npu", "status"),
    [
        ("2.12.0", "2.12.0", "ok"),
        ("2.10.0+cpu", "2.10.0.post4", "ok"),
        ("2.13.0", "2.13.0+git1a2b3c4", "ok"),
        ("2.13.0", "2.13.0rc1", "ok"),
        ("2.12.0", "2.11.0", "failed"),
        ("2.1.0", "2.10.0", "failed"),
        (None, "2.12.0", "failed"),
        ("2.12.0", None, "not checked"),
    ],
)
def test_torch_npu_must_be_of_torchs_version(
    torch: str | None, torch_npu: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch=torch, torch_npu=torch_npu)
    assert version_results()["torch_npu version"].status == status


def test_a_version_that_the_table_does_not_know_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.14.0", torch_npu="2.14.0")
    result = version_results()["torch_npu version"]
    assert (result.status, versions.TABLE_DATE in result.text) == ("ok", True)


def test_a_python_that_torch_npu_is_not_built_for_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.12.0", torch_npu="2.12.0")
    monkeypatch.setitem(versions.PYTHON_OF_TORCH, "2.12", ((3, 8), (3, 9)))
    result = version_results()["torch_npu version"]
    assert (result.status, "Python 3.8 to 3.9" in result.text) == ("failed", True)


def test_packages_are_compared_with_what_the_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["grpcio>=1", 'torch<2.14,>=2.9; extra == "models"', 'torch==1.0; extra == "npu"']
    monkeypatch.setattr(versions, "requires", lambda _project: asked)
    everything = dict.fromkeys(versions.PACKAGES, "2.10.0") | {versions.PROJECT.replace("-", "_"): "0.1.0"}
    pretend(monkeypatch, **everything)
    assert version_results()["packages"].status == "ok"
    pretend(monkeypatch, **{**everything, "torch": "2.8.0"})
    result = version_results()["packages"]
    assert (result.status, "torch 2.8.0: expected" in result.text) == ("failed", True)
    pretend(monkeypatch, **{**everything, "transformers": None})
    assert "eagle-pangu[models]" in version_results()["packages"].text


def test_a_torch_that_torch_npu_keeps_from_being_imported_ends_with_an_explanation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> object:
        cause = ImportError("libhccl.so: cannot open shared object file")
        raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable ...") from cause

    monkeypatch.setattr(torch_import.importlib, "import_module", broken)
    results = by_name(examination.examine((), "smollm2-135m-instruct"))
    assert results["import torch"].status == "failed"
    assert "libhccl.so" in results["import torch"].text
    assert "CANN" in results["import torch"].text
    assert results["devices"] == Result("devices", "not checked", "every check of a device needs torch")


def test_any_other_failed_import_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name)

    monkeypatch.setattr(torch_import.importlib, "import_module", without)
    assert torch_import.check_torch_import().text == "import transformers: ImportError: No module named 'transformers'"


def test_a_torch_npu_that_pip_does_not_know_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    pretend(monkeypatch, torch_npu=None)
    result = version_results()["torch_npu version"]
    assert (result.status, str(tmp_path / "torch_npu") in result.text) == ("not checked", True)


def test_an_interrupt_ends_the_examination() -> None:
    def check() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_check("it", check)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CheckFailedError("x"), ("failed", "x")),
        (NotCheckedError("x"), ("not checked", "x")),
        (RuntimeError("x"), ("failed", "RuntimeError: x")),
        (IndexError(), ("failed", "IndexError: without a text")),
        (AssertionError("x"), ("failed", "AssertionError: x")),
        (SystemExit(3), ("failed", "SystemExit: 3")),
        (MemoryError(), ("failed", "MemoryError: without a text")),
    ],
)
def test_a_check_that_breaks_has_failed(error: BaseException, expected: tuple[str, str]) -> None:
    def check() -> str:
        raise error

    assert run_check("it", check)[1:] == expected
