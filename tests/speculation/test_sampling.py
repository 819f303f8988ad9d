"""Choosing a token: greedy takes the arg-max, the smallest id on ties; a tree draws what plain decoding draws."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from eagle_pangu.speculation.draw import Drawn
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.noise import gumbel
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.sampling import Choice, Choices, Sampler, greedy, logprobs
from eagle_pangu.speculation.tree import TokenTree
from tests.trees import token_trees


@pytest.fixture(autouse=True, scope="module")
def _guard() -> Iterator[None]:
    with IndexGuard():
        yield


# ---- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_highest_logit_and_its_margin() -> None:
    choice = greedy(torch.tensor([[0.0, 3.0, 1.0], [5.0, 2.0, 4.5]]))
    assert choice.token_ids.tolist() == [1, 0]
    assert choice.margins.tolist() == [2.0, 0.5]


def test_a_tie_goes_to_the_smallest_id_with_margin_zero() -> None:
    choice = greedy(torch.tensor([[1.0, 7.0, 7.0, 7.0]], dtype=torch.bfloat16))
    assert choice.token_ids.tolist() == [1]
    assert choice.margins.tolist() == [0.0]


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1000, 49152])
def test_any_vocabulary_agrees_with_the_plain_definition(vocab: int) -> None:
    # Coarse values, so that ties abound, within a piece and across pieces.
    logits = torch.randint(0, 50 * vocab, (33, vocab), generator=torch.Generator().manual_seed(vocab)) // 40
    logits = logits.float()
    choice = greedy(logits)
    assert choice.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    if vocab > 1:
        highest = logits.topk(2, dim=-1).values
        assert choice.margins.tolist() == (highest[:, 0] - highest[:, 1]).tolist()


def test_a_tie_far_away_goes_to_the_smallest_id() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, [300, 1500]] = 1.0
    assert greedy(logits).token_ids.tolist() == [300]
    assert greedy(logits).margins.tolist() == [0.0]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    greedy(logits)
    assert logits.tolist() == [[0.0, 3.0, 1.0]]


# ---- the sampler -----------------------------------------------------------------------------------------------------

VOCAB = 40
EVERYTHING = SamplingParameters(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    seed=11,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias=((3, 2.0), (7, -1.0)),
    min_tokens=4,
    end_token_ids=(0, 1),
    bad_words=((2,), (4, 5), (3, 3, 3)),
    allowed_token_ids=tuple(range(30)),
)
SETTINGS = {
    "greedy": SamplingParameters(),
    "greedy, processed": replace(EVERYTHING, temperature=0.0),
    "drawn": SamplingParameters(temperature=1.0, seed=5),
    "everything": EVERYTHING,
}
settings_of_every_kind = pytest.mark.parametrize("parameters", SETTINGS.values(), ids=SETTINGS)


def logits_after(history: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    """[1, vocab] logits of a model that looks at the whole history; coarse, so that ties abound."""
    digest = zlib.crc32(np.asarray(history, dtype=np.int64).tobytes())
    return (3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(digest))).bfloat16()


def path_of(tree: TokenTree, row: int) -> list[int]:
    return tree.token_ids[np.flatnonzero(tree.mask[row])].tolist()  # type: ignore[no-any-return]


def tree_logits(prompt: list[int], tree: TokenTree) -> torch.Tensor:
    return torch.cat([logits_after(prompt + path_of(tree, row)) for row in range(tree.rows)])


def decoded_plainly(parameters: SamplingParameters, prompt: list[int], start: int, path: list[int]) -> Choice:
    """Commit a path but for its last token, one by one, and decide after that."""
    sampler = Sampler(parameters, prompt, start)
    for token_id in path[:-1]:
        sampler.commit([token_id])
    return sampler.decide(logits_after(prompt + path), TokenTree.root_only(path[-1])).of([0])


prompts = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@settings_of_every_kind
@settings(max_examples=10)
@given(tree=token_trees(max_rows=10, vocab_size=12, scored=False), prompt=prompts, data=st.data())
def test_a_row_decides_what_plain_decoding_of_its_path_does(
    parameters: SamplingParameters, tree: TokenTree, prompt: list[int], data: st.DataObject
) -> None:
    parameters.validate(VOCAB)
    start = data.draw(st.integers(0, len(prompt)))
    choice = Sampler(parameters, prompt, start).decide(tree_logits(prompt, tree), tree).of(range(tree.rows))
    for row in range(tree.rows):
        alone = decoded_plainly(parameters, prompt, start, path_of(tree, row))
        assert alone.token_ids.tolist() == [choice.token_ids[row]]
        assert alone.margins.tolist() == [choice.margins[row]]


@settings_of_every_kind
@settings(max_examples=10)
@given(tree=token_trees(max_rows=10, vocab_size=12, scored=False), prompt=prompts, data=st.data())
def test_neither_other_rows_nor_their_order_change_a_decision(
    parameters: SamplingParameters, tree: TokenTree, prompt: list[int], data: st.DataObject
) -> None:
    order = [0]
    while len(order) < tree.rows and data.draw(st.booleans()):
        ready = [row for row in range(1, tree.rows) if row not in order and tree.parents[row] in order]
        order.append(data.draw(st.sampled_from(ready)))
    number = {row: new for new, row in enumerate(order)}
    part = TokenTree.build(tree.token_ids[order], [number[int(tree.parents[row])] for row in order])
    sampler = Sampler(parameters, prompt, len(prompt))
    whole = sampler.decide(tree_logits(prompt, tree), tree).of(order)
    for _ in range(2):  # deciding is pure: the second time is as the first
        choice = sampler.decide(tree_logits(prompt, part), part).of(range(part.rows))
        assert choice.token_ids.tolist() == whole.token_ids.tolist()
        assert choice.margins.tolist() == whole.margins.tolist()


@settings_of_every_kind
def test_rounds_over_any_tree_give_the_tokens_of_plain_decoding(parameters: SamplingParameters) -> None:
    prompt, length = [5, 6, 7], 40
    plain = Sampler(parameters, prompt, len(prompt))
    expected = plain.first(logits_after(prompt)).token_ids.tolist()
    while len(expected) < length:
        choices = plain.decide(logits_after(prompt + expected), TokenTree.root_only(expected[-1]))
        plain.commit(expected[-1:])
        expected.append(choices[0])

    sampler = Sampler(parameters, prompt, len(prompt))
    answer = sampler.first(logits_after(prompt)).token_ids.tolist()
    rounds = 0
    while len(answer) < length:
        right = expected[len(answer) : len(answer) + rounds % 4]  # drafts of 0 to 3 right tokens, and a wrong one
        chain = [answer[-1], *right, 31]
        tree = TokenTree.build(chain, np.maximum(np.arange(len(chain)) - 1, 0))
        choices = sampler.decide(tree_logits(prompt + answer[:-1], tree), tree)
        path = [0, *tree.accept(choices)]
        sampler.commit(tree.token_ids[path].tolist())
        answer += choices.of(path).token_ids.tolist()
        rounds += 1
    assert answer[:length] == expected[:length]


@settings_of_every_kind
def test_a_session_opened_again_goes_on_as_before(parameters: SamplingParameters) -> None:
    prompt, answer = [5, 6, 7], [8, 5, 5, 9, 3]
    before = Sampler(parameters, prompt, len(prompt))
    before.commit(answer[:-1])
    again = Sampler(parameters, prompt + answer, len(prompt))
    logits = logits_after(prompt + answer)
    expected = before.decide(logits, TokenTree.root_only(answer[-1])).of([0])
    assert [column.tolist() for column in again.first(logits)] == [column.tolist() for column in expected]


def test_the_seed_decides_what_is_drawn() -> None:
    def drawn(seed: int) -> list[int]:
        chain = TokenTree.build([0] * 50, np.maximum(np.arange(50) - 1, 0))
        sampler = Sampler(SamplingParameters(temperature=1.0, seed=seed), [1, 2], 2)
        choice = sampler.decide(torch.zeros(50, VOCAB), chain).of(range(50))
        return choice.token_ids.tolist()  # type: ignore[no-any-return]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_what_is_drawn_is_the_best_of_logits_over_temperature_plus_noise() -> None:
    logits = logits_after([1], vocab=1000)
    choice = Sampler(SamplingParameters(temperature=0.5, seed=3), [9, 9, 9], 2).first(logits)
    perturbed = logits[0].float().numpy() / np.float32(0.5) + gumbel(3, 3, 1000)
    runner_up, best = np.sort(perturbed)[-2:]
    assert choice.token_ids.tolist() == [perturbed.argmax()]
    assert choice.margins.tolist() == [best - runner_up]


def test_the_margin_of_a_truncated_draw_is_over_the_tokens_that_are_left() -> None:
    logits = logits_after([1], vocab=5000)
    choice = Sampler(SamplingParameters(temperature=0.5, top_k=3, seed=3), [9, 9, 9], 2).first(logits)
    left = np.argsort(-logits[0].float().numpy(), kind="stable")[:3]
    perturbed = logits[0].float().numpy()[left] / np.float32(0.5) + gumbel(3, 3, 5000)[left]
    runner_up, best = np.sort(perturbed)[-2:]
    assert choice.token_ids.tolist() == [left[perturbed.argmax()]]
    assert choice.margins.tolist() == [best - runner_up]


def test_where_one_token_is_left_it_is_taken_by_an_infinite_margin() -> None:
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParameters(temperature, allowed_token_ids=(17,)), [1], 1)
        choice = sampler.first(logits_after([1]))
        assert (choice.token_ids.tolist(), choice.margins.tolist()) == ([17], [float("inf")])


@pytest.mark.parametrize("temperature", [1e-6, 100.0])
def test_the_outermost_temperatures_decide(temperature: float) -> None:
    parameters = SamplingParameters(temperature, top_p=0.9, repetition_penalty=100.0, logit_bias=((3, 100.0),))
    parameters.validate(VOCAB)
    choice = Sampler(parameters, [1, 2, 3], 3).first(1000 * logits_after([1]))
    assert 0 <= choice.token_ids[0] < VOCAB
    assert choice.margins[0] >= 0


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_over_many_positions_follow_softmax(temperature: float, top_p: float) -> None:
    """Chi-square on eight tokens, 2000 positions: p > 1e-4."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.2])
    sampler = Sampler(SamplingParameters(temperature, top_p=top_p, seed=2024), [0], 1)
    chain = TokenTree.build(np.zeros(100), np.maximum(np.arange(100) - 1, 0))
    counts = np.zeros(8)
    for _ in range(20):
        counts += np.bincount(sampler.decide(logits.expand(100, 8), chain).of(range(100)).token_ids, minlength=8)
        sampler.commit(chain.token_ids.tolist())

    scores = TopPLogitsWarper(top_p)(torch.zeros(1, 1), logits[None] / temperature)
    expected = scores.softmax(-1)[0].double().numpy() * counts.sum()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    freedom = float(possible.sum() - 1)
    assert torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)) > 1e-4


def test_only_the_rows_on_the_accepted_path_are_drawn() -> None:
    drawn: list[int] = []

    def draw(row: int) -> Drawn:
        drawn.append(row)
        return Drawn([7, 1, 2, 9, 3][row], np.float32(0.5))

    tree = TokenTree.build([0, 5, 7, 8, 2], [0, 0, 0, 1, 2])
    choices = Choices(draw)
    path = [0, *tree.accept(choices)]
    assert path == [0, 2, 4]
    assert choices.of(path).token_ids.tolist() == [7, 2, 3]
    assert drawn == path


# ---- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [6, 400])
@pytest.mark.parametrize("top", [0, 1, 5, 6])
def test_log_probabilities_agree_with_the_plain_definition(vocab: int, top: int) -> None:
    logits = torch.cat([logits_after([row], vocab) for row in range(9)])
    chosen = [row % vocab for row in range(9)]
    found = logprobs(logits, chosen, top)
    plain = logits.float().log_softmax(-1).numpy()
    assert found.chosen.tolist() == [plain[row, token_id] for row, token_id in enumerate(chosen)]
    assert found.top_ids.shape == found.top.shape == (9, top)
    for row, values in enumerate(logits.float().tolist()):
        best = sorted(range(vocab), key=lambda i, values=values: (-values[i], i))[:top]
        assert found.top_ids[row].tolist() == best
        assert found.top[row].tolist() == plain[row, best].tolist()


def test_equal_log_probabilities_come_by_smaller_id() -> None:
    found = logprobs(torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]]), [4], 3)
    assert found.top_ids.tolist() == [[1, 3, 2]]
