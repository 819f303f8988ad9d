"""Prompt files: what is refused, and how items are spread and sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_pangu.evaluation.prompts import PromptFileError, default_prompts, load_prompts, spread
from eagle_pangu.evaluation.sharding import Shard

GOOD = {"id": "a", "source": "test", "turns": ["Hello?"]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_prompt_file_gives_its_items_in_order(tmp_path: Path) -> None:
    two = {"id": "b", "source": "test", "category": "chat", "turns": ["One\u2028line", "Two"]}
    items = load_prompts(write(tmp_path / "p.jsonl", GOOD, "", two, ""))
    assert [item.id for item in items] == ["a", "b"]
    assert items[1].turns == ("One\u2028line", "Two")
    assert items[1].category == "chat"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{not json", ""),
        ("[1, 2]", ""),
        ({"source": "test", "turns": ["x"]}, "id"),
        ({"id": "b", "turns": ["x"]}, "source"),
        ({"id": "b", "source": "test"}, "turns"),
        ({"id": 7, "source": "test", "turns": ["x"]}, "id"),
        ({"id": "b", "source": " ", "turns": ["x"]}, "source"),
        ({"id": "b", "source": "test", "turns": []}, "turns"),
        ({"id": "b", "source": "test", "turns": "x"}, "turns"),
        ({"id": "b", "source": "test", "turns": ["x", 3]}, "turns[1]"),
        ({"id": "b", "source": "test", "turns": ["x"], "category": None}, "category"),
        ({"id": "b", "source": "test", "turns": ["x"], "prompt": "x"}, "prompt"),
        ({"id": "a", "source": "test", "turns": ["x"]}, "id"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(tmp_path: Path, line: object, field: str) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, line)
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path)
    assert (caught.value.line, caught.value.field) == (2, field)
    assert str(caught.value).startswith(f"{path}:2: {field}")


def test_an_empty_or_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="at least one item"):
        load_prompts(write(tmp_path / "p.jsonl", "", ""))
    with pytest.raises(PromptFileError, match="cannot be read"):
        load_prompts(tmp_path / "missing.jsonl")


def test_the_set_of_this_project_loads_and_is_mixed() -> None:
    items = default_prompts()
    assert len(items) >= 40
    assert len({item.category for item in items}) >= 6
    assert sum(len(item.turns) == 2 for item in items) >= 8


def test_a_limit_spreads_evenly_and_always_the_same_way() -> None:
    items = list(range(160))
    assert spread(items, 40) == list(range(0, 160, 4))
    assert spread(items, 3) == [0, 53, 106]
    assert spread(items, 160) == spread(items, 1000) == items
    assert spread(items, 1) == [0]
    for limit in range(1, 161):
        chosen = spread(items, limit)
        gaps = {after - before for before, after in zip(chosen, [*chosen[1:], 160], strict=True)}
        assert len(chosen) == limit
        assert max(gaps) - min(gaps) <= 1
    with pytest.raises(ValueError, match="limit"):
        spread(items, 0)


def test_shards_are_disjoint_and_together_hold_every_item() -> None:
    items = list(range(10))
    parts = [Shard.parse(f"{index}/3").of(items) for index in (1, 2, 3)]
    assert sorted(item for part in parts for item in part) == items
    assert [len(part) for part in parts] == [4, 3, 3]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", ""])
def test_a_bad_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shard"):
        Shard.parse(text)
