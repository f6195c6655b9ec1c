"""Needles in text, asked for at its end in one pass."""

import dataclasses
import re

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
from pe_lab.model import Model, model_schedule
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


# ---------------------------------------------------------------------------------------------------------------------
# With distractors


def text_of(tokens):
    return bytes(np.asarray(tokens).astype(np.uint8)).decode()


@pytest.fixture(scope="module")
def distracted():
    text = np.random.default_rng(1).integers(97, 123, (40, 1024)).astype(np.int32)
    return text, passkeys.distractor_questions(text, 3, ByteTokenizer(), seed=2)


def test_needles_stand_anywhere_and_all_keys_and_values_differ(distracted):
    text, asked = distracted
    assert asked.length == 1024 and asked.suffixes.shape[:3] == (40, 4, 4)
    places = []
    for words, tokens, depth in zip(text, asked.tokens, asked.depth, strict=True):
        found = re.findall(r"\nOne of the special magic numbers for (\S+) is: (\d{7})\.\n", text_of(tokens))
        assert len(found) == len(dict(found)) == len({value for _, value in found}) == 4
        start = "A special magic number is hidden within the following text. "
        assert text_of(tokens).startswith(
            start + "Make sure to memorize it. I will quiz you about the number afterwards."
        )
        left = re.sub(r"\nOne of the special magic numbers for \S+ is: \d{7}\.\n", "", text_of(tokens)).split("\n", 1)[
            1
        ]
        assert text_of(words).startswith(left)  # the haystack is whole, from its first token
        places += sorted(depth)
    places = np.reshape(places, (40, 4))
    assert places.min() < 0.16 and places.max() > 0.7  # behind the first sentences, before the question
    assert np.diff(places).std() > 0.05  # not at even distances
    assert (np.diff(asked.depth) < 0).any() and (np.diff(asked.depth) > 0).any()  # nor in the order of the questions


def test_every_question_has_every_value_as_an_answer(distracted):
    _, asked = distracted
    for tokens, suffixes, at, values, depth in zip(
        asked.tokens, asked.suffixes, asked.at, asked.values, asked.depth, strict=True
    ):
        found = dict(re.findall(r"for (\S+) is: (\d{7})", text_of(tokens)))
        keys = []
        for q in range(4):
            place = round(depth[q] * 1024)
            key, own = re.match(
                r"\nOne of the special magic numbers for (\S+) is: (\d{7})", text_of(tokens[place:])
            ).groups()
            keys.append(key)
            assert text_of(values[q, q]) == own == found[key]
            for v in range(4):
                words = text_of(suffixes[q, v]).rstrip("\0")
                assert words == (
                    f"\nWhat is the special magic number for {key} mentioned in the provided text? The special magic "
                    f"number for {key} mentioned in the provided text is: {text_of(values[q, v])}"
                )
                assert text_of(suffixes[q, v][at[q, v] + 1]) == text_of(values[q, v]) == text_of(values[v, v])
        assert len(set(keys)) == 4


def test_scores_of_values_by_hand():
    """Two sequences, two needles of two digits each; -1, -2 ... are the log-probabilities of a value's digits."""
    shape = (2, 2, 2, 2)
    asked = passkeys.DistractorQuestions(
        *(np.zeros(one, np.int32) for one in ((2, 4), (2, 2, 2, 5), shape, shape)),
        counted=np.ones(shape, bool),
        depth=np.array([[0.1, 0.5], [0.6, 0.7]]),
    )
    log_p = np.zeros(shape)
    log_p[0] = [[[-1, -1], [-2, -2]], [[-3, -3], [-1, -1]]]  # both keys: their own value is the likeliest
    log_p[1] = [[[-1, -1], [-2, -2]], [[-1, -1], [-2, -1]]]  # the first value is the likeliest, whatever the key
    likeliest = np.zeros(shape, bool)
    likeliest[0, 0, 0] = True
    likeliest[0, 1, 1] = [True, False]  # a digit is wrong
    likeliest[0, 0, 1] = likeliest[1, 1, 0] = True  # answers to other questions
    found = passkeys.score_values(log_p, likeliest, asked)
    assert found["accuracy"] == 1 / 4 and found["accuracy_by_window"] == [0.5, 0] and found["queries"] == 4
    assert found["choice"] == 3 / 4 and found["choice_by_window"] == [1, 0.5] and found["chance"] == 0.5
    # Of each value, its sum after its own key less that after the other: 4, 2; and 0, 1.
    assert found["key_gain_by_window"] == [3, 0.5] and found["key_gain"] == 1.75
    assert found["answer_nll_by_window"] == [(2 + 2) / 4, (2 + 3) / 4]
    # Sequences are independent, questions are not: the error of the mean of 1 and 1/2, of 1/2 and 0, of 3 and 1/2.
    assert found["choice_stderr"] == pytest.approx(np.std([1, 0.5], ddof=1) / 2**0.5)
    assert found["stderr"] == pytest.approx(np.std([0.5, 0], ddof=1) / 2**0.5)
    assert found["key_gain_stderr"] == pytest.approx(np.std([3, 0.5], ddof=1) / 2**0.5)
    counted = np.ones(shape, bool)
    counted[..., 1] = False  # values of one token, and padding
    found = passkeys.score_values(log_p, likeliest, dataclasses.replace(asked, counted=counted))
    assert found["accuracy"] == 2 / 4 and found["answer_nll"] == (1 + 1 + 1 + 2) / 4


def test_one_needle_is_no_choice():
    asked = passkeys.distractor_questions(TEXT, 0, ByteTokenizer())
    likeliest = np.ones(asked.at.shape, bool)
    found = passkeys.score_values(np.full(asked.at.shape, -0.5), likeliest, asked)
    assert found["accuracy"] == 1 and found["answer_nll"] == 0.5 and not {"choice", "key_gain"} & set(found)


def hand_scored(tokens, suffixes, at, values):
    """[Q, V] sums of log-probabilities, and whether all are the likeliest: a pass over every whole sequence."""
    total, greedy = np.zeros(suffixes.shape[:2]), np.zeros(suffixes.shape[:2], bool)
    for q, v in np.ndindex(total.shape):
        whole = np.concatenate([tokens, suffixes[q, v]])
        schedule = model_schedule(Model(tiny.MODEL).config, layers(Rope(), 2), len(whole))
        logits = np.asarray(tiny.apply(tiny.parameters(), whole[None], schedule))[0].astype(np.float64)
        rows = logits[len(tokens) + at[q, v]]
        total[q, v] = sum(row[token] - np.log(np.exp(row).sum()) for row, token in zip(rows, values[q, v], strict=True))
        greedy[q, v] = (rows.argmax(-1) == values[q, v]).all()
    return total, greedy


def test_the_suite_asks_each_question_by_itself(tmp_path):
    """20 s. Against whole passes, one for each question and value, also of a cropped context."""
    data = tiny.corpus(tmp_path, 6000)
    checkpoint = tiny.checkpoint(Rope(), data, training_length=400)
    subject = Subject(tiny.language_model(checkpoint), "tiny", "pretrain/checkpoints/3")

    def evaluation(lengths, variants=("as trained",), **options):
        plan = EvaluationPlan(lengths, ("passkeys",), variants, (), {"distractors": 1, "passkey_windows": 3} | options)
        return Evaluation([subject], data, plan, tmp_path / "out", devices=tiny.one_device(), quiet=True)

    opened = evaluation((512,), ("as trained", "cropped"))
    records = opened.run()
    asked = passkeys.SUITE._questions(opened, 0, 512)
    assert [record["variant"] for record in records] == ["as trained", "cropped"]
    for record, first in zip(records, (0, 112), strict=True):
        total, greedy = zip(
            *(
                hand_scored(tokens[first:], *one)
                for tokens, *one in zip(asked.tokens, asked.suffixes, asked.at, asked.values, strict=True)
            ),
            strict=True,
        )
        total, own = np.stack(total), np.arange(2)
        assert record["accuracy"] == pytest.approx(np.stack(greedy)[:, own, own].mean(), abs=1e-6)
        assert record["choice"] == pytest.approx((total.argmax(2) == own).mean(), abs=1e-6)
        gain = (total[:, own, own] - total[:, 1 - own, own]).mean()
        assert record["key_gain"] == pytest.approx(gain, abs=1e-4)
        assert record["answer_nll"] == pytest.approx(-total[:, own, own].mean() / 7, rel=1e-5)
        assert "passkeys" not in record["settings"] and record["settings"]["distractors"] == 1
    assert records[0]["key_gain"] != records[1]["key_gain"]
    with pytest.raises(UserError, match="--passkeys and --distractors: .* Leave --passkeys out"):
        evaluation((512,), passkeys=4)
    with pytest.raises(UserError, match="--distractors=7: 8 needles and a question have .* tokens, more than the 512"):
        evaluation((512,), distractors=7)
    with pytest.raises(UserError, match="distractors .*is not a whole number from 0 to 31"):
        evaluation((512,), distractors=32)
    with pytest.raises(UserError, match="held-out tokens, too few for 50 sequences of 512"):
        evaluation((512,), passkey_windows=50)
    checkpoint.metadata["training_length"] = 64
    with pytest.raises(UserError, match=r"a question has \d+ tokens, and RoPE, cropped context reads 64"):
        evaluation((512,), ("cropped",))
    assert "need a KV cache" in passkeys.SUITE.impossible_in_training(passkeys.PasskeySettings(distractors=1))
    assert not passkeys.SUITE.impossible_in_training(passkeys.PasskeySettings())
