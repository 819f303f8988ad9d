"""Whole runs: what is learnt, what is measured, what is exported, what the card says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.training import loop, pipeline
from draft_service.training.batches import Batch, load_batch
from draft_service.training.evaluation import acceptance, chain_tokens_per_round
from draft_service.training.loop import load_trained, rate
from draft_service.training.settings import TrainingSettings
from draft_service.training.unroll import distillation_loss, plan_steps, unroll
from eagle_pangu.speculation.eagle3.formats import load_head
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.draft_service.training.toy import (
    BIGRAM_WIDTH,
    CPU,
    Quiet,
    bigram_teacher,
    follower,
    loaded,
    random_head,
    toy_settings,
    write_walks,
)

EPOCHS, STEPS = 12, 3


def walking_settings(folder: Path, **changes: Any) -> TrainingSettings:
    settings = TrainingSettings(
        teacher=bigram_teacher(folder / "teacher"),
        answers=write_walks(folder / "walks.jsonl"),
        output=folder / "output",
        draft_vocab=44,
        batch_tokens=128,
        steps_ahead=STEPS,
        epochs=EPOCHS,
        lr=3e-3,
        threads=1,
        dtype="float32",
    )
    return replace(settings, **changes)


class Finished:
    """A run over text that can be learnt."""

    def __init__(self, folder: Path) -> None:
        self.screen = Quiet()
        self.settings = walking_settings(folder)
        self.head = pipeline.run(self.settings, self.screen)
        self.output = self.settings.output
        lines = (self.output / "training" / "metrics.jsonl").read_text().splitlines()
        self.metrics = [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("run"))


def test_a_head_learns_what_can_be_learnt(finished: Finished) -> None:
    losses = [line["train_loss"] for line in finished.metrics[1:]]
    assert losses == sorted(losses, reverse=True)
    first, last = finished.metrics[0], finished.metrics[-1]
    assert [line["epoch"] for line in finished.metrics] == list(range(EPOCHS + 1))
    assert max(first["acceptance"]) < 0.3
    assert min(last["acceptance"]) > 0.8  # chance is 1 in 40
    assert last["chain_tokens_per_round"] > 3


def test_first_step_epochs_teach_step_0_and_leave_the_later_ones_to_the_others(tmp_path: Path) -> None:
    settings = walking_settings(tmp_path, first_step_epochs=EPOCHS // 2)
    pipeline.run(settings, Quiet())
    lines = (settings.output / "training" / "metrics.jsonl").read_text().splitlines()
    accepted = [json.loads(line)["acceptance"] for line in lines]
    middle, last = accepted[EPOCHS // 2], accepted[-1]
    assert middle[0] > 0.8
    assert max(middle[1:]) < 0.6
    assert last[1] > middle[1] + 0.1


@pytest.mark.parametrize("change", [{"feature_norm": "none"}, {"autocast": True}], ids=str)
def test_every_variant_learns(tmp_path: Path, change: dict[str, Any]) -> None:
    screen = Quiet()
    pipeline.run(walking_settings(tmp_path, **change), screen)
    metrics = (tmp_path / "output" / "training" / "metrics.jsonl").read_text().splitlines()
    assert min(json.loads(metrics[-1])["acceptance"]) > 0.6


def test_stages_and_metrics_are_told_as_they_come(finished: Finished) -> None:
    assert finished.screen.stages == ["answers", "vocabulary", "features", "training", "rehearsal", "export"]
    said = "\n".join(finished.screen.said)
    assert "vocabulary: 44 ids cover 100.0 % of the held-out answer tokens" in said
    assert "features: 0.00 GB in" in said
    for line in finished.metrics:
        assert f"epoch {line['epoch']}: held-out acceptance by step {line['acceptance'][0]:.3f}" in said
    for stage, total in (("features", 960), ("training", finished.metrics[-1]["step"])):
        done = [told for name, told, of in finished.screen.told if name == stage]
        assert done == sorted(done)
        assert done[-1] == total


def test_the_exported_head_loads_and_is_the_trained_one(finished: Finished) -> None:
    teacher = loaded(finished.settings.teacher)
    embeddings = teacher.model.get_input_embeddings().weight
    exported = load_head(finished.head, embeddings=embeddings, dtype=torch.float32)
    trained = load_trained(finished.output / "training")
    for parameter in trained.parameters():
        parameter.data = parameter.data.bfloat16().float()
    trained.embed_tokens.weight = torch.nn.Parameter(embeddings.clone())
    assert exported.config == trained.config
    assert torch.equal(exported.target_ids, trained.target_ids)
    ids, features = torch.randint(260, (9,)), torch.randn(9, 3 * BIGRAM_WIDTH)
    plan = plan_steps([9], [2], STEPS, CPU)
    with torch.no_grad():
        pairs = [[head.logits(output) for output in unroll(head, ids, features, plan)] for head in (exported, trained)]
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.equal(ours, theirs)


def test_the_exported_head_drafts_what_the_teacher_says(finished: Finished) -> None:
    embeddings = loaded(finished.settings.teacher).model.get_input_embeddings().weight
    head = load_head(finished.head, embeddings=embeddings, dtype=torch.float32)
    walk = [3]
    while len(walk) < 12:
        walk.append(follower(walk[-1]))
    features = embeddings[torch.tensor(walk)].repeat(1, 3)  # that teacher's layers add nothing to the embedding
    with torch.no_grad():
        outputs = unroll(head, torch.tensor(walk), features, plan_steps([12], [4], STEPS, CPU))
        said = [head.target_ids[head.logits(output).argmax(-1)].tolist() for output in outputs]
    right = sum(token == walk[-len(tokens) :][place] for tokens in said for place, token in enumerate(tokens))
    assert right >= 0.8 * sum(map(len, said))


def test_the_card_says_what_the_run_recorded(finished: Finished) -> None:
    card = " ".join((finished.head / "README.md").read_text().split())
    last = finished.metrics[-1]
    shares = " | ".join(f"{share:.3f}" for share in last["acceptance"])
    for expected in (
        "# EAGLE-3 head for teacher",
        "Read from `walks.jsonl`: 40 answers (40 greedy) of 480 tokens (40 distinct ids)",
        "38 of them are trained on and 2 held out",
        "Training-time test of 3 steps with weights 0.8^k",
        "learning rate 0.003",
        f"{last['step']} optimiser steps of 128 tokens at most, seed 0. Teacher in float32",
        "100.0 % are among the 44 ids",
        f"| {EPOCHS} | {shares} | {last['chain_tokens_per_round']:.2f} | {last['train_loss']:.3f} |",
        "2 greedy answers, drafted by trees of at most 15 rows and depth 8",
    ):
        assert expected in card
    assert "{" not in card


def test_a_head_that_learnt_drafts_the_held_out_answers(finished: Finished) -> None:
    record = json.loads((finished.output / "rehearsal" / "stage.json").read_text())["results"]
    rates = record["tokens_per_round"]
    assert rates["eagle3"] > 3  # 12 tokens an answer, 2 rounds at best: 5.5
    assert rates["hybrid"] >= rates["eagle3"]
    card = (finished.head / "README.md").read_text()
    assert f"| eagle3 | {rates['eagle3']:.2f} | {record['by_position']['eagle3'][0]:.2f} |" in card


def test_an_own_run_s_card_says_how_the_teacher_was_asked(tmp_path: Path) -> None:
    settings = toy_settings(tmp_path, epochs=1)
    card = " ".join((pipeline.run(settings, Quiet()) / "README.md").read_text().split())
    assert "The teacher's answers to `prompts.jsonl` through its chat template, of at most 12 tokens, 60.0 %" in card
    results = json.loads((settings.output / "features" / "stage.json").read_text())["results"]
    assert f"outside it at {100 * results['held_out_argmax_outside']:.1f} % of them" in card
    assert 0 < results["held_out_argmax_outside"] < 1


# What a step is asked, and what counts as right.


def toy_batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    lengths, prompts = [9, 7], [4, 3]
    return Batch(
        lengths,
        prompts,
        torch.randint(50, (16,), generator=generator),
        torch.randn(16, 36, generator=generator),
        torch.randn(9, 12, generator=generator),
        torch.zeros(9, dtype=torch.int64),
    )


def best_by_answer(head: Eagle3Head, batch: Batch, k: int) -> dict[int, int]:
    """The head's first choice at step k for each answer token that the step predicts."""
    plan = plan_steps(batch.lengths, batch.prompts, STEPS, CPU)
    with torch.no_grad():
        outputs = list(unroll(head, batch.token_ids, batch.features, plan))
    return dict(
        zip(plan[k].answers.tolist(), head.target_ids[head.logits(outputs[k]).argmax(-1)].tolist(), strict=True)
    )


def test_acceptance_is_the_share_of_answer_tokens_where_head_and_teacher_agree() -> None:
    head, batch = random_head(), toy_batch()
    for answer, token in best_by_answer(head, batch, 0).items():
        batch.argmax[answer] = token
    assert acceptance(head, [batch], STEPS)[0] == 1.0
    batch.argmax[0] = 4  # an even id: outside the draft vocabulary, so never right
    batch.argmax[7] += 2
    assert acceptance(head, [batch], STEPS)[0] == pytest.approx(7 / 9)
    expected = [
        np.mean([batch.argmax[answer] == token for answer, token in best_by_answer(head, batch, k).items()])
        for k in range(STEPS)
    ]
    assert acceptance(head, [batch], STEPS) == pytest.approx(expected)


def test_a_chain_goes_on_as_long_as_every_step_is_right() -> None:
    assert chain_tokens_per_round([0.5, 0.4, 0.3]) == pytest.approx(1 + 0.5 + 0.2 + 0.06)
    assert chain_tokens_per_round([]) == 1.0


@pytest.mark.parametrize("answer", range(9))
def test_the_loss_reads_exactly_the_answer_tokens_that_are_usable(answer: int) -> None:
    head, batch = random_head(), toy_batch()
    plan = plan_steps(batch.lengths, batch.prompts, STEPS, CPU)

    def loss(targets: torch.Tensor, usable: torch.Tensor) -> float:
        outputs = unroll(head, batch.token_ids, batch.features, plan)
        return distillation_loss(head, outputs, plan, targets, usable).item()

    targets, usable = torch.randn(9, 20).softmax(-1), torch.ones(9, dtype=torch.bool)
    changed = targets.clone()
    changed[answer] = changed[answer].flip(0)
    with torch.no_grad():
        assert loss(targets, usable) != loss(changed, usable)
        usable[answer] = False
        assert loss(targets, usable) == loss(changed, usable)


def test_a_batch_holds_each_sequence_with_its_own_rows(finished: Finished) -> None:
    run = pipeline._Run(finished.settings, Quiet())
    run._store.open()
    sequences = run._corpus.sequences
    batch = load_batch(run._store, sequences, [5, 2], CPU)
    assert batch.lengths == [24, 24]
    assert batch.token_ids.tolist() == [
        *sequences[5].prompt_ids,
        *sequences[5].response_ids,
        *sequences[2].prompt_ids,
        *sequences[2].response_ids,
    ]
    # That teacher predicts the answer itself, from the token before it.
    assert batch.argmax.tolist() == [*sequences[5].response_ids, *sequences[2].response_ids]
    embeddings = loaded(finished.settings.teacher).model.get_input_embeddings().weight
    expected = embeddings[batch.token_ids].repeat(1, 3).bfloat16().float()
    torch.testing.assert_close(batch.features, expected)
    before = torch.cat([batch.token_ids[11:23], batch.token_ids[35:47]])
    normed = embeddings[before] / embeddings[before].square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(batch.finals, normed, atol=0.02, rtol=0.02)


def test_an_epoch_trains_on_every_sequence_but_the_held_out_ones_in_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def recording(store: Any, sequences: Any, indices: list[int], device: torch.device) -> Batch:
        read.extend(indices)
        return load_batch(store, sequences, indices, device)

    monkeypatch.setattr(loop, "load_batch", recording)
    pipeline.run(walking_settings(tmp_path, epochs=2), Quiet())
    orders = [read[start : start + 38] for start in (2, 42)]  # 2 of 40 are held out, and come before and after
    assert [sorted(read[start : start + 2]) for start in (0, 40, 80)] == [[0, 1]] * 3
    assert [sorted(order) for order in orders] == [list(range(2, 40))] * 2
    assert orders[0] != orders[1]


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [rate(step, 1000) for step in range(1000)]
    assert rates[:30] == pytest.approx([(step + 1) / 30 for step in range(30)])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[30] == 1.0
    assert rates[-1] < 1e-4
    assert rate(0, 1) == 1.0


def test_another_seed_is_another_head(finished: Finished, tmp_path: Path) -> None:
    other = walking_settings(tmp_path, seed=1, epochs=1)
    pipeline.run(other, Quiet())
    pipeline.run(replace(other, output=tmp_path / "again", seed=0), Quiet())
    heads = [load_trained(tmp_path / place / "training").layer.q_proj.weight for place in ("output", "again")]
    assert not torch.equal(*heads)
