"""Whether the KV that sessions may come to hold fits the device: asked once, at start, and not when it is too late."""

from __future__ import annotations

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.layouts.rectangle import SPARE_SHARE
from eagle_pangu.speculation.plan import whole_blocks

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
    copies = 1 + (settings.branch == "replicate")
    columns = copies * (kv_tokens + settings.slots * engine.spare_columns) + settings.prefix_cache_tokens
    if settings.batching != "ragged":
        # As long as the longest session for every session of a pass, whatever the others hold; never given back.
        longest = whole_blocks(int(settings.slot_capacity * (1 + SPARE_SHARE)))
        columns += min(settings.group_size, settings.slots) * longest
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
