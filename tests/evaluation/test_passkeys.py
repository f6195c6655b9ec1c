"""Needles in text, asked for at its end in one pass."""

import numpy as np
import pytest
import tiny
import tokenizers

from pe_lab.data.tokenizers import ByteTokenizer, load_tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites import passkeys
from pe_lab.evaluation.variants import Subject
from pe_lab.model import Model
from pe_lab.positional import Rope, layers

TEXT = np.random.default_rng(0).integers(97, 123, (3, 1024)).astype(np.int32)


@pytest.fixture(scope="module")
def asked():
    return passkeys.passkey_sequences(TEXT, 4, ByteTokenizer(), seed=1)


def test_every_answer_is_the_number_of_the_needle_at_its_depth(asked):
    assert asked.tokens.shape == TEXT.shape
    for tokens, at, answers, question, depth in zip(
        asked.tokens, asked.at, asked.answers, asked.question, asked.depth, strict=True
    ):
        text = bytes(tokens.astype(np.uint8)).decode()
        assert sorted(set(question)) == [0, 1, 2, 3]
        gaps = np.diff(np.sort(depth))
        assert gaps.max() - gaps.min() < 0.02 and depth.max() < 0.6  # at even distances, before the questions
        for q in range(4):
            places = at[question == q]
            value = bytes(answers[question == q].astype(np.uint8)).decode().strip()
            assert bytes(tokens[places + 1].astype(np.uint8)).decode().strip() == value
            key = text[: places[0] + 1].rpartition("number for ")[2].partition(" mentioned")[0]
            sentence = f"One of the special magic numbers for {key} is: {value}."
            assert text.index(sentence) == int(depth[q] * len(tokens)) + 1
            assert text.count(value) == 2


def test_the_tokens_of_an_answer_are_those_of_its_needle(tmp_path):
    """A tokenizer as Llama 2's begins each text with a space of its own."""
    letters = {letter: n for n, letter in enumerate(["\u2581", "\n", *map(chr, range(33, 127)), "\u2581\u2581"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [("\u2581", "\u2581")]))
    spaces = [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    made.normalizer = tokenizers.normalizers.Sequence(spaces)
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.encode_prompt(" 4", add_special_tokens=False).tolist() == [letters["\u2581\u2581"], letters["4"]]
    asked = passkeys.passkey_sequences(tokenizer.encode_prompt("abc " * 400)[:1024][None], 4, tokenizer, seed=1)
    for q in range(4):
        answer = asked.answers[0][asked.question[0] == q].tolist()
        needle = asked.tokens[0][int(asked.depth[0][q] * 1024) :].tolist()
        assert len(answer) == 7 and any(needle[n : n + 7] == answer for n in range(100))
        before = asked.at[0][asked.question[0] == q][0]
        assert asked.tokens[0][before] == letters["\u2581"]


def test_an_answer_with_one_wrong_token_is_wrong(asked):
    likeliest = np.ones(asked.at.shape, bool)
    found = passkeys.score(np.full(asked.at.shape, -0.5), likeliest, asked)
    assert found["accuracy"] == 1 and found["answer_nll"] == 0.5 and found["queries"] == 12 and found["stderr"] == 0
    likeliest[0, np.flatnonzero(asked.question[0] == 2)[3]] = False
    likeliest[1, np.flatnonzero(asked.question[1] == 1)] = False
    found = passkeys.score(np.full(asked.at.shape, -0.5), likeliest, asked)
    assert found["accuracy"] == 10 / 12 and found["accuracy_by_window"] == [0.75, 0.75, 1.0]
    assert sum(s * c for s, c in zip(found["by_depth"]["score"], found["by_depth"]["count"], strict=True) if c) == 10


def test_padding_of_shorter_answers_does_not_count(asked):
    """Values of fewer tokens than others' leave places without a question."""
    question = asked.question.copy()
    question[0, -2:] = -1
    padded = passkeys.PasskeySequences(asked.tokens, asked.at, asked.answers, question, asked.depth)
    losses, likeliest = np.full(asked.at.shape, -1.0), np.ones(asked.at.shape, bool)
    losses[0, -2:], likeliest[0, -2:] = -100, False
    found = passkeys.score(losses, likeliest, padded)
    assert found["accuracy"] == 1 and found["answer_nll"] == 1


def test_the_suite_measures_what_the_scores_say(tmp_path):
    """3 s."""
    data = tiny.corpus(tmp_path, 6000)
    subject = Subject(tiny.language_model(tiny.checkpoint(Rope(), data)), "tiny", "pretrain/checkpoints/3")

    def evaluation(lengths, **options):
        plan = EvaluationPlan(
            lengths, ("passkeys",), ("as trained",), (), {"passkeys": 2, "passkey_windows": 3} | options
        )
        return Evaluation([subject], data, plan, tmp_path / "out", devices=tiny.one_device(), quiet=True)

    opened = evaluation((512,))
    (record,) = opened.run()
    asked = passkeys.SUITE._sequences(opened, 0, 512)
    forward = Forward(Model(tiny.MODEL).config, devices=tiny.one_device())
    targets = np.roll(asked.tokens, -1, 1)
    losses = forward.losses(tiny.parameters(), {"tokens": asked.tokens, "targets": targets}, layers(Rope(), 2))
    expected = np.take_along_axis(losses, asked.at, 1).mean(1)
    np.testing.assert_allclose(record["answer_nll_by_window"], expected, rtol=1e-5)
    with pytest.raises(UserError, match="passkeys needs sequences of at least 128 tokens, not 64"):
        evaluation((64, 512))
    with pytest.raises(UserError, match="held-out tokens, too few for 50 sequences of 512"):
        evaluation((512,), passkey_windows=50)
    with pytest.raises(UserError, match="2 needles, questions and answers have .* tokens, more than the 256"):
        evaluation((256,))
