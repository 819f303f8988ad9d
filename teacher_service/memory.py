"""Whether the KV that sessions may come to hold fits the device: asked once, at start, and not when it is too late."""

from __future__ import annotations

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.engine import Engine

MEBIBYTE = 2**20


def require_memory(engine: Engine, kv_tokens: int, settings: TeacherSettings) -> None:
    """The model is loaded: what is free now is for KV.

    Args:
        engine: loaded, no slot open.
        kv_tokens: of all sessions together.
        settings: the teacher's section.

    Raises:
        StartError: KV for all sessions and for the prefix cache is more than is free; names both and the settings.
    """
    copies = 1 + (settings.branch == "replicate") + (settings.batching != "ragged")  # those hold sessions' KV once more
    columns = copies * (kv_tokens + settings.slots * engine.spare_columns) + settings.prefix_cache_tokens
    needed = engine.cache_shape.bytes_per_token * columns
    free = engine.device.memory().free
    if needed > free:
        tokens = (
            f"teacher.kv_tokens = {kv_tokens}"
            if settings.kv_tokens
            else f"teacher.slots = {settings.slots} times teacher.slot_capacity = {settings.slot_capacity} tokens"
        )
        raise StartError(
            f"{tokens} and teacher.prefix_cache_tokens = {settings.prefix_cache_tokens} need "
            f"{needed / MEBIBYTE:.0f} MiB for KV, and {free / MEBIBYTE:.0f} MiB are free on {engine.device.name}; "
            "lower teacher.kv_tokens, teacher.slots or teacher.slot_capacity"
        )
