"""The model card of a trained head, as Markdown. Every figure is one of the run's own records."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from draft_service.training.answering import GREEDY_SHARE, SAMPLING
from draft_service.training.loop import BETAS, MOST_GRADIENT, WARM_UP
from draft_service.training.rehearsal import SPAN
from draft_service.training.settings import TrainingSettings
from draft_service.training.unroll import STEP_WEIGHT

CARD = """\
# EAGLE-3 head for {teacher}

Drafts for `{teacher}` (tokenizer SHA-256 `{tokenizer}`) and for no other model. The token embeddings are the teacher's
and not in the file. Made by `eagle-pangu train-draft`; SafeAILab's format{variant}, bfloat16.

## Data

{source}: {answers:,} answers ({greedy_answers:,} greedy) of {answer_tokens:,} tokens
({distinct_answer_ids:,} distinct ids) to prompts of {prompt_tokens:,} tokens. {train_sequences:,} of them are trained
on and {held_out_sequences:,} held out, whole conversations at a time; {tokens:,} tokens in all, sequences of at most
{longest_sequence:,}.

## Recipe

Training-time test of {steps_ahead} steps with weights {step_weight}^k: soft cross-entropy against the teacher's
distribution, renormalised over the draft vocabulary, at answer tokens only. Embeddings and output
layer begin as the teacher's, the layer at random; embeddings are frozen; {trained_parameters:,} parameters are trained.

AdamW {betas} without weight decay, learning rate {lr:g} after {warm_up} of warm-up and with a cosine to 0, gradient
norm at most {most_gradient}. {epochs} epochs, {alone}{steps:,} optimiser steps of {batch_tokens:,} tokens at most, seed
{seed}. Teacher in {dtype}, head in {head_dtype}.

## On held-out answers

Of the answer tokens, {covered} are among the {size:,} ids of the draft vocabulary. The teacher's own choice is outside
it at {outside} of them, which count as misses. Share of answer tokens where the head's first choice is the teacher's:

{table}

## Drafting held-out answers

{drafting}

## Limits

* It proposes only. A poor match to the text at hand costs speed, never a token.
* The shares are over text like that trained on, each step given the true tokens before it; the chain takes the steps as
  independent.
* Ids outside the draft vocabulary are never proposed.
"""


def model_card(settings: TrainingSettings, dtype: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The card.

    Args:
        settings: of the run.
        dtype: of the teacher, resolved.
        records: results of each stage by its name.
    """
    answers, features, training = records["answers"], records["features"], records["training"]
    asked = {name: getattr(settings, name) for name in ("steps_ahead", "lr", "epochs", "batch_tokens", "seed")}
    figures = {**answers, **records["vocabulary"], **features, **training}
    text = CARD.format(
        **{**figures, **asked, "teacher": answers["teacher"]["name"]},
        tokenizer=answers["teacher"]["tokenizer_sha256"],
        variant=" with SpecForge's `fc_norm`" if settings.feature_norm == "each" else "",
        source=_source(settings),
        step_weight=STEP_WEIGHT,
        betas=BETAS,
        warm_up=_percent(WARM_UP),
        most_gradient=MOST_GRADIENT,
        alone=f"the first {settings.first_step_epochs} of step 0 alone, " if settings.first_step_epochs else "",
        dtype=dtype,
        head_dtype="bfloat16 autocast" if settings.autocast else "float32",
        covered=_percent(figures["held_out_coverage"]),
        outside=_percent(figures["held_out_argmax_outside"]),
        table=_table(training["metrics"]),
        drafting=_drafting(records["rehearsal"]),
    )
    return "\n\n".join(_filled(block) for block in text.strip().split("\n\n")) + "\n"


def _filled(block: str) -> str:
    """A paragraph wrapped anew; headings, tables and lists as they are."""
    return block if block[0] in "#|*" else textwrap.fill(block, 120, break_long_words=False, break_on_hyphens=False)


def _source(settings: TrainingSettings) -> str:
    if settings.answers is not None:
        return f"Read from `{settings.answers.name}`"
    assert settings.prompts is not None
    return (
        f"The teacher's answers to `{settings.prompts.name}` through its chat template, of at most "
        f"{settings.max_new_tokens} tokens, {_percent(GREEDY_SHARE)} of the conversations greedily and the others at "
        f"temperature {SAMPLING['temperature']}, top-p {SAMPLING['top_p']}"
    )


def _table(metrics: Sequence[Mapping[str, Any]]) -> str:
    steps = len(metrics[0]["acceptance"])
    rows = [
        ["epoch", *(f"step {step}" for step in range(steps)), "tokens per round of a chain", "training loss"],
        ["---"] * (steps + 3),
    ]
    for line in metrics:
        loss = "" if line["train_loss"] is None else f"{line['train_loss']:.3f}"
        accepted = (f"{share:.3f}" for share in line["acceptance"])
        rows.append([str(line["epoch"]), *accepted, f"{line['chain_tokens_per_round']:.2f}", loss])
    return _lines(rows)


def _drafting(rehearsal: Mapping[str, Any]) -> str:
    if not rehearsal["answers"]:
        return "No held-out answer was decoded greedily, so none was drafted."
    rates = rehearsal["tokens_per_round"]
    spans = max(map(len, rehearsal["by_position"].values()))
    rows = [
        ["drafter", "tokens per round", *(f"from answer token {SPAN * span}" for span in range(spans))],
        ["---"] * (spans + 2),
    ]
    for name, rate in rates.items():
        found = [f"{share:.2f}" for share in rehearsal["by_position"][name]]
        rows.append([name, f"{rate:.2f}", *found, *[""] * (spans - len(found))])
    text = (
        f"{rehearsal['answers']:,} greedy answers, drafted by trees of at most {rehearsal['rows']} rows and depth "
        f"{rehearsal['depth']} and accepted as far as the answer goes along:"
    )
    return text + "\n\n" + _lines(rows)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
