"""Which ids a draft vocabulary holds, and how much of a text it covers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draft_service.training.settings import TrainingError
from draft_service.training.vocabulary import choose_vocabulary, coverage, forced_ids
from eagle_pangu.speculation.checkpoints import Tokenizer, read_tokenizer
from tests.draft_service.training.toy import loaded, toy_teacher


def responses(*ids: list[int]) -> list[np.ndarray]:
    return [np.array(response, dtype=np.int32) for response in ids]


def ends_and_tokenizer(directory: Path) -> tuple[tuple[int, ...], Tokenizer]:
    return loaded(directory).eos_token_ids, read_tokenizer(directory)


def test_the_most_frequent_ids_are_kept_in_ascending_order_and_ties_go_to_the_lower_id() -> None:
    counted = responses([9, 9, 9, 4, 4], [7, 7, 5, 5, 2])
    assert choose_vocabulary(counted, [], size=3, vocab_size=12).tolist() == [4, 5, 9]


def test_forced_ids_are_in_however_rare() -> None:
    counted = responses([9, 9, 9, 4, 4, 7])
    assert choose_vocabulary(counted, [11, 2, 11], size=3, vocab_size=12).tolist() == [2, 9, 11]


def test_the_lowest_unused_ids_fill_up() -> None:
    assert choose_vocabulary(responses([1, 8]), [6], size=6, vocab_size=12).tolist() == [0, 1, 2, 3, 6, 8]
    assert choose_vocabulary([], [], size=3, vocab_size=3).tolist() == [0, 1, 2]


def test_a_vocabulary_too_small_for_the_forced_ids_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"--draft-vocab: expected at least 2, .* got 1"):
        choose_vocabulary([], [1, 2], size=1, vocab_size=12)


def test_coverage_counts_tokens() -> None:
    assert coverage(responses([1, 1, 1, 5], [5, 1, 9, 9]), np.array([1, 5])) == 0.75
    assert coverage([], np.array([1])) == 0.0


def test_what_ends_an_answer_and_what_the_template_writes_is_forced(tmp_path: Path) -> None:
    directory = toy_teacher(tmp_path)
    assert forced_ids(*ends_and_tokenizer(directory)) == [256, 257]  # <|im_start|>, <|im_end|>; not <pad>
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}{{ messages }}<pad>"
    settings["eos_token"] = "<|endoftext|>"  # named, but not by the template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert forced_ids(*ends_and_tokenizer(directory)) == [256, 257, 259]  # 257 ends answers
