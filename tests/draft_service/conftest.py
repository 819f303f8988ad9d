"""The scripted drafter, on offer beside the real ones, and threads for tiny models; all under the index watch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from draft_service.drafters.registry import DRAFTERS
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.draft_service.fakes import ScriptedDrafter
from tests.draft_service.heads import RecordingEngine, random_head
from tests.index_watch import index_watch

__all__ = ["index_watch"]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedDrafter:
    drafter = ScriptedDrafter()
    monkeypatch.setitem(DRAFTERS, "scripted", lambda settings: drafter)
    return drafter


@pytest.fixture(scope="module", autouse=True)
def _every_level() -> Iterator[None]:
    """Heads of random weights expect little of any level; these tests are of what levels do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draft_service.drafters.eagle3.LEAST_GAIN", 0.0)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Such small models only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def head() -> Eagle3Head:
    return random_head()


@pytest.fixture
def engine(head: Eagle3Head) -> RecordingEngine:
    return RecordingEngine(head)
