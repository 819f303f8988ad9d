"""The drafters by name. A new one is a module beside this one and a line in the registry.

A drafter that holds a model is imported when it is loaded, so that a draft service without one needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draft_service.drafters.base import Drafter
from draft_service.drafters.ngram import NgramDrafter
from eagle_pangu.serving.settings import DraftSettings

Loader = Callable[[DraftSettings], Drafter[Any, Any]]
"""Blocking; may raise DrafterError."""


def _load_ngram(settings: DraftSettings) -> Drafter[Any, Any]:
    return NgramDrafter(settings.ngram_min, settings.ngram_max, settings.ngram_matches)


def _load_standalone(settings: DraftSettings) -> Drafter[Any, Any]:
    from draft_service.drafters.standalone import load_standalone

    return load_standalone(settings)


def _load_eagle3(settings: DraftSettings) -> Drafter[Any, Any]:
    from draft_service.drafters.heads import load_eagle3

    return load_eagle3(settings)


def _load_hybrid(settings: DraftSettings) -> Drafter[Any, Any]:
    from draft_service.drafters.heads import load_eagle3
    from draft_service.drafters.hybrid import HybridDrafter

    # A head of its own: another thread may be drafting with the one of `eagle3`.
    return HybridDrafter(load_eagle3(settings), settings.ngram_min, settings.ngram_max, settings.ngram_matches)


DRAFTERS: dict[str, Loader] = {
    "ngram": _load_ngram,
    "standalone": _load_standalone,
    "eagle3": _load_eagle3,
    "hybrid": _load_hybrid,
}


def offered(settings: DraftSettings) -> list[str]:
    """Names of the drafters that these settings allow, in the order of the registry."""
    return [name for name in DRAFTERS if settings.offers(name)]
