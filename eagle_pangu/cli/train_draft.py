"""`eagle-pangu train-draft`: hands over to the draft service's trainer, which this package must not import.

The process becomes the trainer's (`exec`): terminal, signals and exit status are then its own, and nothing has to be
passed on, which for a run of hours is worth more than a parent that waits.
"""

from __future__ import annotations

import os
import sys

import typer

TRAINER = "draft_service.training"


def train_draft(context: typer.Context) -> None:
    """Train an EAGLE-3 head for a teacher, from the teacher's own answers; --help lists its flags."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.execv(sys.executable, [sys.executable, "-m", TRAINER, *context.args])
