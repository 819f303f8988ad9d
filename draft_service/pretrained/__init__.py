"""EAGLE-3 heads that come with the project: a folder each, named as the model that it drafts for, with a model card."""

from __future__ import annotations

from pathlib import Path

PRETRAINED = Path(__file__).parent


def pretrained_heads() -> dict[str, Path]:
    """Folders by the name of the head's teacher."""
    return {config.parent.name: config.parent for config in sorted(PRETRAINED.glob("*/config.json"))}
