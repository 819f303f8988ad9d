"""From logits to the token that the teacher decides: greedy, or drawn by a seed. Ties go to the smallest id.

A draw is exact in the sense that greedy is: it depends on the request, the tokens before it and the logits, never on
the tree that it was computed in, so a drafted token is accepted when it is the very token that is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.noise import from_words, gumbel, words
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.processors import Likely, best_tokens, best_values, likely, process
from eagle_pangu.speculation.tree import TokenTree

T = TypeVar("T")


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
        if parameters.is_greedy:
            return greedy(scores)
        scores /= parameters.temperature  # a copy already
        positions = histories.positions.tolist()
        # Which of the two is the parameters' matter and never the rows', so a row's bits do not depend on its company.
        if parameters.truncates:
            return self._draw_likely(likely(scores, parameters), positions, scores.shape[1])
        self._noise = _held(self._noise, positions, partial(self._noise_at, scores))
        for row, position in zip(scores, positions, strict=True):
            row += self._noise[position]  # a view: this writes scores
        return greedy(scores)

    def _noise_at(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        return torch.from_numpy(gumbel(self._parameters.seed, position, scores.shape[1])).to(scores.device)

    def _draw_likely(self, left: Likely, positions: Sequence[int], vocab_size: int) -> Choice:
        """Each row's best token by score plus noise, of those that are left."""
        self._words = _held(self._words, positions, lambda each: words(self._parameters.seed, each, vocab_size))
        counts = torch.bincount(left.rows, minlength=len(positions))
        starts = counts.cumsum(0) - counts
        token_ids = left.token_ids.cpu().numpy()
        # Row by row: what NumPy makes of a value might depend on the values beside it.
        noise = [
            from_words(self._words[position][own])
            for position, own in zip(positions, np.split(token_ids, starts[1:].cpu().numpy()), strict=True)
        ]
        perturbed = left.values + torch.from_numpy(np.concatenate(noise)).to(left.values.device)
        table = perturbed.new_full((len(positions), int(counts.max())), float("-inf"))
        columns = torch.arange(len(perturbed), device=perturbed.device) - starts[left.rows]
        table[left.rows, columns] = perturbed
        places, margins = greedy(table)
        return Choice(token_ids[starts.cpu().numpy() + places], margins)


def _held(held: dict[int, T], positions: Sequence[int], draw: Callable[[int], T]) -> dict[int, T]:
    """What is held of these positions, drawn where it is not, and of no others."""
    return {each: held[each] if each in held else draw(each) for each in set(positions)}


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
