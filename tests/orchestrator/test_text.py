"""Text to ids and back: templates as transformers renders them, deltas of whole characters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from orchestrator.detokenizer import LONGEST_WINDOW, Detokenizer
from orchestrator.tokenizer import ChatTemplateError, Message, Tokenizer
from tests.orchestrator.conftest import stack
from tests.orchestrator.scripted import (
    CHAT_TEMPLATE,
    EOS,
    TOKENIZER,
    TOKENIZER_JSON,
    ScriptedTeacher,
    ids_of,
    knowing,
    saying,
)

MARK = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "plain words, and some more",
    "emoji 😀 and a family 👩‍👩‍👧‍👦 and a flag 🏳️‍🌈!",
    "日本語のテキスト。中文字符",
    "العربية من اليمين",
    "combining e\u0301 n\u0303 and हिन्दी",
    "   leading spaces\n\n\tand tabs  ",
    "a real \N{REPLACEMENT CHARACTER} mark",
    "nul \0 byte",
]


def merging_tokenizer() -> FastTokenizer:
    """Byte-level with merges across character boundaries: no pre-tokenizer keeps characters together."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def sentencepiece_tokenizer() -> FastTokenizer:
    """As Llama 2 has it: spaces as ▁, bytes as <0xNN>, a leading space stripped from the whole text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = FastTokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


KINDS = {"bytes": TOKENIZER, "merges": merging_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param].to_str().encode())


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.finish()


@pytest.mark.parametrize("text", [*TEXTS, " ".join(TEXTS) * 4])
def test_pieces_make_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_anywhere_drops_only_the_character_cut_through(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    before = ""
    for length in range(len(ids) + 1):
        pieces, rest = pieces_of(tokenizer, ids[:length])
        got = "".join(pieces) + rest
        assert text.startswith(got)
        assert len(got) >= max(len(before), len(tokenizer.decode(ids[:length]).rstrip(MARK)))
        before = got


@pytest.mark.parametrize("text", TEXTS)
def test_no_whole_character_is_dropped(text: str) -> None:
    ids = ids_of(text)
    for length in range(len(ids) + 1):
        pieces, rest = pieces_of(Tokenizer(TOKENIZER_JSON), ids[:length])
        assert "".join(pieces) + rest == text.encode()[:length].decode(errors="ignore")


def test_any_ids_at_all_make_the_text_of_the_whole() -> None:
    tokenizer, chance = Tokenizer(KINDS["merges"].to_str().encode()), random.Random(1)
    for _ in range(100):
        ids = [chance.randrange(tokenizer.size) for _ in range(80)]
        pieces, rest = pieces_of(tokenizer, ids)
        whole = tokenizer.decode(ids)
        assert "".join(pieces) + rest in (whole, whole.removesuffix(MARK))


def test_special_and_unknown_ids_have_no_text_and_split_nothing() -> None:
    tokenizer = Tokenizer(KINDS["merges"].to_str().encode())
    smile = tokenizer.encode("😀")
    pieces, rest = pieces_of(tokenizer, [smile[0], 0, 1, 10_000, *smile[1:]])
    assert "".join(pieces) + rest == "😀"


def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, decode = 0, tokenizer.decode

    def measured(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", measured)
    pieces_of(tokenizer, tokenizer.encode("".join(TEXTS) * 10))
    pieces_of(tokenizer, [tokenizer.encode("😀")[-1]] * 500)  # bytes that never make a character
    assert longest <= 2 * LONGEST_WINDOW


def test_a_template_renders_as_transformers_renders_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}\n"
        "    {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
        "    {% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n{{ strftime_now('%Y') }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if tools is none and documents is none %}nothing{% endif %}{{ eos_token }}"
    )
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=KINDS["merges"], chat_template=template, **special)
    ours = Tokenizer(KINDS["merges"].to_str().encode(), template, special)
    messages = [
        Message("system", 'be <b>brief</b> & "kind"'),
        Message("user", "  日本 😀 <|im_end|> '' \n"),
        Message("assistant", "x"),
        Message("user", "never shown"),
    ]
    dicts = [message._asdict() for message in messages]
    rendered = ours.render_chat(messages)
    assert rendered == theirs.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
    assert ours.encode(rendered) == theirs.apply_chat_template(dicts, add_generation_prompt=True)["input_ids"]
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_template_may_refuse_and_may_not_reach_out() -> None:
    refusing = Tokenizer(TOKENIZER.to_str().encode(), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.render_chat([Message("user", "x")])
    reaching = Tokenizer(TOKENIZER.to_str().encode(), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        reaching.render_chat([Message("user", "x")])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(TOKENIZER.to_str().encode()).render_chat([Message("user", "x")])


@pytest.mark.parametrize(("json", "template"), [(b"{}", ""), (b"\xff", ""), (TOKENIZER.to_str().encode(), "{% if %}")])
def test_a_tokenizer_that_cannot_be_read_is_a_value_error(json: bytes, template: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_json|chat_template"):
        Tokenizer(json, template)


def test_encoding_adds_nothing_and_reads_special_tokens_written_out() -> None:
    tokenizer = Tokenizer(TOKENIZER.to_str().encode(), CHAT_TEMPLATE)
    assert tokenizer.encode("a<|im_end|>") == [*ids_of("a"), EOS]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("right", [0, 1, 3, 8])
async def test_streamed_text_does_not_depend_on_how_tokens_fall_into_rounds(right: int) -> None:
    text = "".join(TEXTS)
    teacher = ScriptedTeacher(saying(6, [*ids_of(text), EOS]))
    async with stack(teacher, knowing(teacher.next_token, lambda number: right)) as each:
        parts = await each.stream(max_tokens=400)
    assert "".join(part.text for part in parts) == text
    whole = [part.text for part in parts if part.text]
    marks = sum(piece.count(MARK) for piece in whole)
    assert marks == 1
