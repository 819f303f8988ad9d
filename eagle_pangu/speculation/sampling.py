"""From logits to the token that the teacher decides: greedy, or drawn by a seed. Ties go to the smallest id.

A draw is exact in the sense that greedy is: it depends on the request, the tokens before it and the logits, never on
the tree that it was computed in, so a drafted token is accepted when it is the very token that is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from eagle_pangu.speculation.draw import Drawn, draw
from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.indexing import gather, index_tensor, marked, replaced
from eagle_pangu.speculation.noise import words
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.processors import process
from eagle_pangu.speculation.tree import TokenTree
from eagle_pangu.speculation.truncation import likely


class Choice(NamedTuple):
    """What the teacher decides after each row.

    token_ids: [rows] int64; margins: [rows] float32, logit of the chosen id minus the next best, >= 0; where processed
    or drawn, of what was compared (infinite where one id alone was left).
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float32]


class Choices:
    """What the teacher decides after each row of a tree. A draw takes the host a while, and only those along the
    accepted path are needed: a row is decided when it is first asked for."""

    def __init__(self, decide: Callable[[int], Drawn]) -> None:
        self._decide = cache(decide)

    def __getitem__(self, row: int) -> int:
        """The token after one row."""
        return self._decide(row).place

    def of(self, rows: Sequence[int]) -> Choice:
        """The tokens after some rows, and their margins."""
        token_ids, margins = zip(*map(self._decide, rows), strict=True)
        return Choice(np.array(token_ids, dtype=np.int64), np.array(margins, dtype=np.float32))


_PIECE = 256


def greedy(logits: torch.Tensor) -> Choice:
    """The arg-max of each row of [rows, vocab] logits and its top-2 margin.

    In two steps, over pieces of the vocabulary and then inside the best one: `argmax` over a whole row is not
    vectorised on CPUs, and takes ten times as long. The margin says how near a tie was: a divergence between numerics
    policies is excused only where it is tiny.
    """
    rows, vocab = logits.shape
    nothing = float("-inf")
    missing = -vocab % _PIECE
    whole = F.pad(logits, (0, missing), value=nothing) if missing else logits
    pieces = whole.reshape(rows, -1, _PIECE)
    highest = pieces.amax(dim=-1)
    piece = highest.argmax(dim=-1, keepdim=True)
    inside = gather(pieces, 1, piece[..., None].expand(rows, 1, _PIECE)).squeeze(1)
    offset = inside.argmax(dim=-1, keepdim=True)
    best = gather(inside, -1, offset)
    elsewhere = replaced(highest, -1, piece, nothing).amax(dim=-1, keepdim=True)
    beside = replaced(inside, -1, offset, nothing).amax(dim=-1, keepdim=True)
    margins = best.float() - torch.maximum(elsewhere, beside).float()
    token_ids = piece * _PIECE + offset
    return Choice(token_ids.squeeze(-1).cpu().numpy(), margins.squeeze(-1).cpu().numpy())


class Sampler:
    """Decides the tokens of one session: arg-max of the processed logits, plus noise where the temperature is not 0.

    Args:
        parameters: valid for the teacher's vocabulary.
        prompt_token_ids: all tokens that the session was opened with.
        answer_start: how many of them are prompt; the rest is answer already, in a session opened again.
    """

    def __init__(
        self, parameters: SamplingParameters, prompt_token_ids: Sequence[int] | NDArray[np.int64], answer_start: int
    ) -> None:
        self._parameters = parameters
        self._committed = np.asarray(prompt_token_ids, dtype=np.int64)
        self._answer_start = answer_start

    @property
    def committed(self) -> NDArray[np.int64]:
        """All tokens that it was told: those it was opened with, and those committed since."""
        return self._committed

    def first(self, logits: torch.Tensor) -> Choice:
        """The token after the prompt, from its [1, vocab] logits."""
        return self._choices(logits, None).of([0])

    def decide(self, logits: torch.Tensor, tree: TokenTree) -> Choices:
        """The token after each row of a tree on top of the committed tokens.

        Args:
            logits: [rows, vocab] of the tree's rows; left as they are.
            tree: its root follows the last committed token.
        """
        return self._choices(logits, tree)

    def commit(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Append tokens that have become final: the root and the accepted rows."""
        self._committed = np.concatenate([self._committed, np.asarray(token_ids, dtype=np.int64)])

    def _choices(self, logits: torch.Tensor, tree: TokenTree | None) -> Choices:
        parameters = self._parameters
        if parameters.is_greedy and not parameters.changes_logits:
            return _all(greedy(logits))
        if tree is None:
            histories = Histories.of_committed(self._committed, self._answer_start)
        else:
            histories = Histories.of_tree(self._committed, self._answer_start, tree)
        scores = process(logits, histories, parameters)
        if parameters.is_greedy:
            return _all(greedy(scores))
        scores /= parameters.temperature  # a copy already
        on_host, positions = scores.cpu().numpy(), histories.positions.tolist()
        return Choices(lambda row: self._draw(on_host[row], positions[row]))

    def _draw(self, scores: NDArray[np.float32], position: int) -> Drawn:
        drawn = words(self._parameters.seed, position, len(scores))
        if not self._parameters.truncates:
            return draw(scores, drawn)
        ids = likely(scores, self._parameters)
        place, margin = draw(scores[ids], drawn[ids])
        return Drawn(int(ids[place]), margin)


def _all(choice: Choice) -> Choices:
    """Of rows that are decided already."""
    decided = [Drawn(*pair) for pair in zip(choice.token_ids.tolist(), choice.margins, strict=True)]
    return Choices(decided.__getitem__)


class LogProbabilities(NamedTuple):
    """Natural logarithms of probabilities, and the best tokens by them.

    chosen: [rows] float32; top_ids: [rows, top] int64, best first; top: [rows, top] float32.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]


def logprobs(logits: torch.Tensor, token_ids: Sequence[int] | NDArray[np.int64], top: int) -> LogProbabilities:
    """Log-softmax of logits as the model gave them, before any processor.

    Args:
        logits: [rows, vocab]; computed on in float32.
        token_ids: [rows] the chosen tokens.
        top: how many of the best tokens to report, 0 to vocab; equal logits by smaller id first.
    """
    logits = logits.float()
    log_probabilities = logits.log_softmax(dim=-1)
    vocab_size, device = logits.shape[1], logits.device
    chosen = index_tensor(token_ids, vocab_size, device, field="token_ids")[:, None]
    ids = _best_ids(logits, max(top, 1))
    scores = gather(logits, 1, index_tensor(ids, vocab_size, device)).cpu().numpy()
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    top_ids = np.take_along_axis(ids, order, axis=1)
    return LogProbabilities(
        gather(log_probabilities, 1, chosen).squeeze(-1).cpu().numpy(),
        top_ids,
        gather(log_probabilities, 1, index_tensor(top_ids, vocab_size, device)).cpu().numpy(),
    )


def _best_ids(logits: torch.Tensor, count: int) -> NDArray[np.int64]:
    """[rows, count] ids of the highest of [rows, vocab] logits, ascending; of equal ones the smaller ids."""
    best = logits.topk(count, dim=-1).values
    lowest = best[:, -1:]
    rows, ids = marked(logits >= lowest)
    tied = (logits == lowest).cpu().numpy()[rows, ids]
    room = (best == lowest).sum(dim=-1).cpu().numpy()  # how many of the tokens at the lowest logit get in
    per_row = np.bincount(rows[tied], minlength=len(logits))
    rank = tied.cumsum() - (per_row.cumsum() - per_row)[rows]  # among the ties of its own row, from 1
    return ids[~tied | (rank <= room[rows])].reshape(len(logits), count)
