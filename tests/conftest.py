"""For every test: property tests are not timed one example at a time; a loaded machine would fail them by chance."""

from hypothesis import settings

settings.register_profile("eagle-pangu", deadline=None, print_blob=True)
settings.load_profile("eagle-pangu")
