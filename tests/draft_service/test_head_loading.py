"""Loading a head: what is read, who it says it is, and everything that can be wrong with the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.drafters.base import Budget, DrafterError, run_alone
from draft_service.drafters.heads import load_eagle3
from draft_service.drafters.registry import offered
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.eagle3.formats import save_head
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.draft_service.heads import RecordingEngine, assert_same, drafter_of, random_features, random_head
from tests.models import EOS, VOCAB_SIZE, tiny_llama

PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).tolist()
BUDGET = Budget(rows=12, depth=5)
EMBEDDINGS = "model.embed_tokens.weight"
FITTING = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": 260, "head_dim": 16}


@pytest.fixture(scope="module")
def teacher_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of which nothing but the embeddings is left."""
    directory = tiny_llama(tmp_path_factory.mktemp("teacher") / "tiny")
    weights = directory / "model.safetensors"
    save_file({EMBEDDINGS: load_file(weights)[EMBEDDINGS]}, weights)
    return directory


@pytest.fixture(scope="module")
def fitting_head(teacher_directory: Path) -> Eagle3Head:
    head = random_head(**FITTING)
    head.load_state_dict(
        {"embed_tokens.weight": load_file(teacher_directory / "model.safetensors")[EMBEDDINGS]}, strict=False
    )
    return head


def settings_of(head_directory: Path | str, teacher_directory: Path | str, **changes: Any) -> DraftSettings:
    return DraftSettings(
        head=str(head_directory), embeddings=str(teacher_directory), dtype="float32", quantize=False, **changes
    )


def saved(head: Eagle3Head, directory: Path) -> Path:
    save_head(head, directory, torch_dtype=torch.float32)
    return directory


@pytest.mark.parametrize("window", [0, 5])
def test_the_configured_head_is_loaded_with_its_teachers_embeddings_and_says_who_it_is(
    tmp_path: Path, teacher_directory: Path, fitting_head: Eagle3Head, window: int
) -> None:
    settings = settings_of(saved(fitting_head, tmp_path / "mine"), teacher_directory, slot_capacity=64, window=window)
    drafter = load_eagle3(settings)
    identity = drafter.identity
    assert (identity.model, identity.vocab_size, identity.eos_token_ids) == ("mine for tiny", VOCAB_SIZE, (EOS,))
    assert (identity.feature_width, len(identity.tokenizer_sha256)) == (192, 64)
    assert (drafter.name, drafter.needs_features, drafter.context_limit) == ("eagle3", True, 64)
    features = random_features(len(PROMPT), 192)
    trees = []
    engine = RecordingEngine(fitting_head, vocab_size=VOCAB_SIZE, window=window)
    for each in (drafter, drafter_of(engine)):
        session = each.open(PROMPT, BUDGET)
        session.read_features(0, features)
        trees.append(run_alone(each, session.propose(BUDGET)))
    assert_same(*trees)


def test_heads_are_offered_where_one_is_configured(tmp_path: Path) -> None:
    assert offered(DraftSettings()) == ["ngram"]
    assert offered(DraftSettings(head=str(tmp_path))) == ["ngram", "eagle3", "hybrid"]
    assert offered(DraftSettings(drafter="hybrid")) == ["ngram", "eagle3", "hybrid"]


def test_without_a_directory_it_is_the_head_that_comes_for_the_teacher(teacher_directory: Path) -> None:
    with pytest.raises(DrafterError, match=r"draft\.head: expected a directory: .*, not for '/.*tiny'"):
        load_eagle3(settings_of("", teacher_directory))


def test_a_head_that_is_not_there_names_the_setting(tmp_path: Path, teacher_directory: Path) -> None:
    with pytest.raises(DrafterError, match=r"draft\.head: .*nowhere"):
        load_eagle3(settings_of(tmp_path / "nowhere", teacher_directory))
    with pytest.raises(DrafterError, match=r"draft\.head: .*tiny"):
        load_eagle3(settings_of(teacher_directory, teacher_directory))


def test_embeddings_that_are_not_there_name_the_setting(tmp_path: Path, fitting_head: Eagle3Head) -> None:
    directory = saved(fitting_head, tmp_path / "head")
    with pytest.raises(DrafterError, match=r"draft\.embeddings: .*nowhere"):
        load_eagle3(settings_of(directory, tmp_path / "nowhere"))
    teacher = tiny_llama(tmp_path / "teacher")
    (teacher / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DrafterError, match=r"draft\.embeddings: .*teacher: embeddings cannot be read"):
        load_eagle3(settings_of(directory, teacher))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, teacher / "model.safetensors")
    with pytest.raises(DrafterError, match=r"draft\.embeddings: .*expected one tensor named \*embed_tokens\.weight"):
        load_eagle3(settings_of(directory, teacher))


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "other layers": ({"feature_layers": (1, 2, 3)}, r"feature layers: \(1, 2, 3\) / \(2, 2, 1\)"),
    "another width": ({"target_hidden_size": 32}, "target_hidden_size: 32 / 64"),
    "another vocabulary": ({"vocab_size": 200, "target_hidden_size": 32}, "vocab_size: 200 / 260"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_head_of_another_teacher_is_refused_with_both_settings_named(
    tmp_path: Path, teacher_directory: Path, misfit: str
) -> None:
    changes, difference = MISFITS[misfit]
    directory = saved(random_head(**{**FITTING, **changes}), tmp_path / "head")
    with pytest.raises(DrafterError, match=rf"draft\.head: .*head .*draft\.embeddings, 'tiny' .*{difference}"):
        load_eagle3(settings_of(directory, teacher_directory))
