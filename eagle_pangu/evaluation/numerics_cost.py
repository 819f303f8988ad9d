"""What `bitwise` numerics cost over `free`: the time of one verification under each, by context length and rows.

Uses the engine directly, in one process, the two policies by turns; services, wire and drafter are left out, so the
ratio is of forward passes alone. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.evaluation.records import SIGNIFICANT_BITS
from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Engine, NumericsChoice
from eagle_pangu.speculation.sampling import greedy
from eagle_pangu.speculation.tree import TokenTree

PREFILL_CHUNK = 128
WARM_UP_PASSES = 2


@dataclass(frozen=True)
class CostSettings:
    """contexts: committed tokens, ascending. rows: rows of a tree, the root included. repeats: timed passes of each."""

    contexts: tuple[int, ...] = (256, 512, 1024, 2048)
    rows: tuple[int, ...] = (1, 16)
    repeats: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Cost:
    """Medians of one shape in milliseconds, and their ratio bitwise / free."""

    context: int
    rows: int
    bitwise_ms: float
    free_ms: float
    ratio: float


class _Runner(NamedTuple):
    engine: Engine
    slot: Slot


def load_engines(
    directory: Path, dtype: str, device: str, threads: int, settings: CostSettings
) -> tuple[Engine, Engine]:
    """A `bitwise` and a `free` engine in performance mode, each with its own copy of the weights.

    Args:
        directory: transformers directory.
        dtype: "float32", "bfloat16" or "float16".
        device: by name.
        threads: host threads; 0: all cores.
        settings: what will be measured; sizes the slots.

    Raises:
        ValueError: unknown dtype or device.
        NoInvarianceError: this machine cannot keep `bitwise`.
        CheckpointError: the directory cannot be loaded.
    """
    if dtype not in SIGNIFICANT_BITS:
        raise ValueError(f"dtype: expected one of {', '.join(SIGNIFICANT_BITS)}, got {dtype!r}")
    place = get_device(device)
    place.configure_threads(threads)
    capacity, most = max(settings.contexts) + max(settings.rows), max(settings.rows)

    def engine(numerics: NumericsChoice) -> Engine:
        return Engine(
            load_checkpoint(directory, getattr(torch, dtype), place),
            place,
            mode="performance",
            numerics=numerics,
            slot_capacity=capacity,
            max_rows=most,
            chunk=PREFILL_CHUNK,
        )

    return engine("bitwise"), engine("free")


def measure(bitwise: Engine, free: Engine, settings: CostSettings) -> Iterator[Cost]:
    """One `Cost` for each context and number of rows, contexts ascending, as soon as it is known.

    Each pass is one `verify` of a binary tree and the choice of its tokens, from call to token ids on the host.
    """
    random = np.random.default_rng(settings.seed)
    tokens = random.integers(0, bitwise.checkpoint.vocab_size, size=max(settings.contexts))
    runners = [_Runner(engine, engine.open_slot()) for engine in (bitwise, free)]
    for context in sorted(settings.contexts):
        for runner in runners:
            _prefill_to(runner, tokens[:context])
        for rows in settings.rows:
            tree = _binary_tree(rows)
            times = _alternate(runners, tree, settings.repeats)
            bitwise_ms, free_ms = (float(np.median(column)) for column in zip(*times, strict=True))
            yield Cost(context, rows, bitwise_ms, free_ms, bitwise_ms / free_ms)


def _alternate(runners: Sequence[_Runner], tree: TokenTree, repeats: int) -> list[tuple[float, ...]]:
    for _ in range(WARM_UP_PASSES):
        for runner in runners:
            _time_ms(runner, tree)
    return [tuple(_time_ms(runner, tree) for runner in runners) for _ in range(repeats)]


def _time_ms(runner: _Runner, tree: TokenTree) -> float:
    started = time.perf_counter()
    logits = runner.engine.verify(runner.slot, tree).logits
    assert logits is not None
    greedy(logits)
    runner.engine.device.synchronize()
    elapsed = time.perf_counter() - started
    runner.engine.abort(runner.slot)
    return 1000 * elapsed


def _prefill_to(runner: _Runner, tokens: NDArray[np.int64]) -> None:
    for start in range(runner.slot.committed_length, len(tokens), PREFILL_CHUNK):
        runner.engine.prefill(runner.slot, tokens[start : start + PREFILL_CHUNK], want_logits=False)


def _binary_tree(rows: int) -> TokenTree:
    """Row i hangs under (i - 1) // 2: two children a node, as deep as a typical draft tree of that size is."""
    return TokenTree.build(np.arange(1, rows + 1), np.maximum((np.arange(rows) - 1) // 2, 0))
