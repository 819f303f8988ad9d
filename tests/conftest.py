"""For every test: property tests are not timed one example at a time; a loaded machine would fail them by chance."""

import pytest
from hypothesis import settings

settings.register_profile("eagle-pangu", deadline=None, print_blob=True, max_examples=40)
settings.load_profile("eagle-pangu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: last, one worker would run it while the others have nothing left to do."""
    items.sort(key=lambda item: item.path.name != "test_simulated_npu.py")
