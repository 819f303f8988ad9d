"""The scripted drafter, on offer beside the real ones."""

from __future__ import annotations

import pytest

from draft_service.drafters.registry import DRAFTERS, Entry
from tests.draft_service.fakes import ScriptedDrafter


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedDrafter:
    drafter = ScriptedDrafter()
    monkeypatch.setitem(DRAFTERS, "scripted", Entry(lambda settings: True, lambda settings: drafter))
    return drafter
