"""From logits to the token that the teacher decides: greedy, or drawn by a seed. Ties go to the smallest id.

A draw is exact in the sense that greedy is: it depends on the request, the tokens before it and the logits, never on
the tree that it was computed in, so a drafted token is accepted when it is the very token that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.noise import from_words, gumbel, words
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.processors import best_tokens, best_values, marked, process, warp
from eagle_pangu.speculation.tree import TokenTree


class Choice(NamedTuple):
    """What the teacher decides after each row.

    token_ids: [rows] int64; margins: [rows] float32, logit of the chosen id minus the next best, >= 0; where processed
    or drawn, of what was compared (infinite where one id alone was left).
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float32]


_PIECE = 256


def greedy(logits: torch.Tensor) -> Choice:
    """The arg-max of each row of [rows, vocab] logits and its top-2 margin.

    In two steps, over pieces of the vocabulary and then inside the best one: `argmax` over a whole row is not
    vectorised on CPUs, and takes ten times as long. The margin says how near a tie was: a divergence between numerics
    policies is excused only where it is tiny.
    """
    rows, vocab = logits.shape
    nothing = float("-inf")
    pieces = F.pad(logits, (0, -vocab % _PIECE), value=nothing).view(rows, -1, _PIECE)
    highest = pieces.amax(dim=-1)
    piece = highest.argmax(dim=-1, keepdim=True)
    inside = pieces.gather(1, piece[..., None].expand(rows, 1, _PIECE)).squeeze(1)
    offset = inside.argmax(dim=-1, keepdim=True)
    best = inside.gather(-1, offset)
    elsewhere = highest.scatter(-1, piece, nothing).amax(dim=-1, keepdim=True)
    beside = inside.scatter(-1, offset, nothing).amax(dim=-1, keepdim=True)
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
        # By position, those of the last call: the next one overlaps it. Of the two one alone is used.
        self._words: dict[int, NDArray[np.uint64]] = {}  # [vocab]
        self._noise: dict[int, torch.Tensor] = {}  # [vocab] float32

    @property
    def committed(self) -> NDArray[np.int64]:
        """All tokens that it was told: those it was opened with, and those committed since."""
        return self._committed

    def first(self, logits: torch.Tensor) -> Choice:
        """The token after the prompt, from its [1, vocab] logits."""
        return self._choose(logits, None)

    def decide(self, logits: torch.Tensor, tree: TokenTree) -> Choice:
        """The token after each row of a tree on top of the committed tokens.

        Args:
            logits: [rows, vocab] of the tree's rows; left as they are.
            tree: its root follows the last committed token.
        """
        return self._choose(logits, tree)

    def commit(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Append tokens that have become final: the root and the accepted rows."""
        self._committed = np.concatenate([self._committed, np.asarray(token_ids, dtype=np.int64)])

    def _choose(self, logits: torch.Tensor, tree: TokenTree | None) -> Choice:
        parameters = self._parameters
        if parameters.is_greedy and not parameters.changes_logits:
            return greedy(logits)
        if tree is None:
            histories = Histories.of_committed(self._committed, self._answer_start)
        else:
            histories = Histories.of_tree(self._committed, self._answer_start, tree)
        scores = process(logits, histories, parameters)
        if not parameters.is_greedy:
            scores = warp(scores, parameters)
            self._add_noise(scores, histories.positions.tolist())
        return greedy(scores)

    def _add_noise(self, scores: torch.Tensor, positions: Sequence[int]) -> None:
        """To each row that of its position; where few tokens are left to draw from, to those alone.

        Which of the two is the parameters' matter and never the rows', so a row's bits do not depend on its company.
        """
        self._hold(set(positions), scores)
        if not self._parameters.truncates:
            for row, position in zip(scores, positions, strict=True):
                row += self._noise[position]  # a view: this writes scores
            return
        rows, ids = marked(scores > float("-inf"))
        left = ids.cpu().numpy()
        ends = np.cumsum(np.bincount(rows.cpu().numpy(), minlength=len(scores)))[:-1]
        # Row by row: what NumPy makes of a value might depend on the values beside it.
        noise = [from_words(self._words[at][own]) for at, own in zip(positions, np.split(left, ends), strict=True)]
        scores[rows, ids] += torch.from_numpy(np.concatenate(noise)).to(scores.device)

    def _hold(self, positions: set[int], scores: torch.Tensor) -> None:
        """Draw what is not held of these positions, and let go of all others."""
        seed, vocab_size = self._parameters.seed, scores.shape[1]
        if self._parameters.truncates:
            held = self._words
            self._words = {each: held[each] if each in held else words(seed, each, vocab_size) for each in positions}
            return
        drawn = self._noise
        self._noise = {
            each: drawn[each] if each in drawn else torch.from_numpy(gumbel(seed, each, vocab_size)).to(scores.device)
            for each in positions
        }


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
    rows, count = len(logits), max(top, 1)
    log_probabilities = logits.log_softmax(dim=-1)
    chosen = torch.as_tensor(np.asarray(token_ids, dtype=np.int64), device=logits.device)[:, None]
    none = torch.zeros((rows, 1), dtype=torch.int64, device=logits.device)
    ids = best_tokens(logits, best_values(logits, count), none)[1].view(rows, count)
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices[:, :top]
    top_ids = ids.gather(1, order)
    return LogProbabilities(
        log_probabilities.gather(1, chosen).squeeze(-1).cpu().numpy(),
        top_ids.cpu().numpy(),
        log_probabilities.gather(1, top_ids).cpu().numpy(),
    )
