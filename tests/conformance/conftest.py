"""The two harness tricks, as fixtures: `self_draft`, where every boundary falls inside an accepted run in every round,
and `scripted_draft`, where any accepted length, bad id, late answer or crash can be had.

Each lives as long as a module, in the event loop of that module: its tests are marked with `MODULE_LOOP`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
import torch

from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.eagle3.formats import save_head
from eagle_pangu.speculation.engine import Engine
from tests.conformance.systems import Known, System, draft_settings, system, teacher_settings, tiny_engine
from tests.draft_service.heads import random_head
from tests.index_watch import index_watch
from tests.models import SHAPE, VOCAB_SIZE, tiny_llama
from tests.orchestrator.scripted import ScriptedDraft

__all__ = ["index_watch"]  # a fixture for every test here

MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="package", autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of answers log too much to be read, and forward passes that fail on purpose print long tracebacks."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random teacher, small enough for hundreds of answers."""
    return tiny_llama(tmp_path_factory.mktemp("conformance") / "teacher", num_hidden_layers=2)


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head of the shape that fits `model`."""
    width = SHAPE["hidden_size"]
    directory = tmp_path_factory.mktemp("conformance") / "head"
    weights = random_head(
        hidden_size=width, target_hidden_size=width, head_dim=SHAPE["head_dim"], vocab_size=VOCAB_SIZE
    )
    save_head(weights, directory, torch_dtype=torch.float32)
    return directory


@pytest.fixture(scope="session")
def engine(model: Path) -> Engine:
    """The teacher's engine; one system after the other serves it."""
    return tiny_engine(model)


@pytest.fixture(scope="session")
def every_drafter(model: Path, head: Path) -> DraftSettings:
    """Offers all of them; `standalone` drafts with the teacher's own model."""
    return draft_settings(model, drafter="standalone", head=str(head), embeddings=str(model))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def self_draft(engine: Engine, model: Path, every_drafter: DraftSettings) -> AsyncIterator[System]:
    """The teacher is its own draft, unless a request names another drafter."""
    async with system(engine, every_drafter, teacher_settings(model)) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted_draft(engine: Engine, model: Path) -> AsyncIterator[System]:
    """The draft proposes what its `plan` says, in every round: the teacher never asks for fewer rows."""
    known = Known()
    settings = teacher_settings(model, advise_rows=False)
    async with system(engine, ScriptedDraft(known.chain(0), known), settings) as each:
        yield each
