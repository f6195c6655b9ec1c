import numpy as np
import pytest
import tiny

from pe_lab.data.held_out import needle_windows
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites import needles
from pe_lab.evaluation.suites.perplexity import bin_edges
from pe_lab.model import Model
from pe_lab.positional import Rope, build_schedule, layers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.corpus(tmp_path_factory.mktemp("corpus"))


def test_the_answers_are_in_the_window(data):
    asked, made = needles.questions(data, 1, 64, 10, 3), needle_windows(data, 1, 64, 3)
    assert asked.at.shape == asked.answers.shape == asked.distance.shape == (10, 2)
    for row in range(10):
        tokens = asked.tokens[row].tolist()
        for at, answer, distance in zip(asked.at[row], asked.answers[row], asked.distance[row], strict=True):
            key = tokens[at]
            assert tokens[at - 1] == made.ask
            fact = next(i for i in range(64) if tokens[i] == made.mark and tokens[i + 1] == key)
            assert tokens[fact + 2] == answer and at + 1 - (fact + 2) == distance


def test_windows_are_held_out_and_follow_the_seed(data):
    asked = needles.questions(data, 1, 64, 4, 3)
    trained = needle_windows(data, 1, 64, 3, "train").batch(np.arange(4))["tokens"]
    assert not (asked.tokens == trained).all(1).any()
    assert not (asked.tokens == needles.questions(data, 1, 64, 4, 4).tokens).all(1).any()
    np.testing.assert_array_equal(asked.tokens, needles.questions(data, 1, 64, 4, 3).tokens)


def test_a_length_that_does_not_hold_the_questions_is_refused(data):
    with pytest.raises(UserError, match="too short"):
        needles.questions(data, 1, 6, 4, 0)


def test_an_oracle_is_always_right_and_a_guesser_rarely(data):
    asked = needles.questions(data, 1, 64, 400, 0)
    found = needles.score(asked.answers, asked)
    assert found["accuracy"] == 1 and found["queries"] == 800 and found["windows"] == 400 and found["stderr"] == 0
    assert all(a in (1, None) for a in found["accuracy_by_distance"]["accuracy"])
    shuffled = np.random.default_rng(0).permutation(asked.answers.ravel()).reshape(asked.answers.shape)
    guessed = needles.score(shuffled, asked)["accuracy"]
    assert abs(guessed - 1 / tiny.NEEDLES["values"]) < 0.05


def test_accuracy_by_distance_adds_up_to_accuracy(data):
    asked = needles.questions(data, 1, 64, 50, 0)
    predicted = np.where(asked.distance < 20, asked.answers, -1)
    found = needles.score(predicted, asked)
    by = found["accuracy_by_distance"]
    assert sum(by["count"]) == found["queries"] == 100
    hits = sum(a * c for a, c in zip(by["accuracy"], by["count"], strict=True) if c)
    assert hits / 100 == pytest.approx(found["accuracy"])
    for low, high, accuracy, count in zip(by["edges"], by["edges"][1:], by["accuracy"], by["count"], strict=False):
        inside = (asked.distance >= low) & (asked.distance < high)
        assert inside.sum() == count
        if count:
            assert accuracy == pytest.approx((predicted == asked.answers)[inside].mean())


def test_accuracy_by_depth_is_by_the_place_of_the_needle(data):
    asked = needles.questions(data, 1, 64, 300, 0)
    fact = asked.at + 1 - asked.distance
    found = needles.score(np.where(fact < 32, asked.answers, -1), asked)["by_depth"]
    assert found["depth"][0] == 5 and found["depth"][-1] == 95 and sum(found["count"]) == 600
    assert found["score"][:5] == [1] * 5 and all(score in (0, None) for score in found["score"][5:])
    assert (np.asarray(found["count"][:9]) > 20).all()


def test_standard_error_is_over_windows():
    right = np.array([[1, 1], [0, 0], [1, 1], [0, 1]])
    tokens = np.zeros((4, 32), int)
    asked = needles.NeedleQuestions(tokens, np.full_like(right, 20), np.ones_like(right), np.full_like(right, 5))
    found = needles.score(right, asked)
    assert found["stderr"] == pytest.approx(right.mean(1).std(ddof=1) / 2)


def test_predictions_are_the_argmax_of_the_logits(data):
    model, described = Model(tiny.MODEL), layers(Rope(), tiny.MODEL.layers)
    asked = needles.questions(data, 1, 32, 5, 0)
    forward = Forward(model.config, devices=tiny.one_device())
    found = forward.predictions(tiny.parameters(), asked.tokens, asked.at, described)
    schedule = build_schedule(described, 2, 2, 8)
    logits = np.asarray(tiny.apply(tiny.parameters(), asked.tokens, schedule))
    np.testing.assert_array_equal(found, np.take_along_axis(logits.argmax(-1), asked.at, 1))


def test_cropping_feeds_the_last_tokens_before_each_answer(data):
    asked = needles.questions(data, 1, 64, 3, 0)
    seen = []

    def model(tokens, at):
        seen.append((tokens, at))
        return np.take_along_axis(tokens, at, 1)  # "predicts" the key, so that rows can be told apart

    found = needles.predict(asked, model, crop=16)
    np.testing.assert_array_equal(found, np.take_along_axis(asked.tokens, asked.at, 1))
    (tokens, at), n = seen[0], 0
    assert tokens.shape == (6, 16) and at.shape == (6, 2)
    for row in range(3):
        for question in asked.at[row]:
            np.testing.assert_array_equal(tokens[n], asked.tokens[row, question - 15 : question + 1])
            assert (at[n] == 15).all()
            n += 1


def test_an_early_question_is_cropped_at_the_start_of_its_window():
    asked = needles.NeedleQuestions(
        np.arange(20)[None], np.array([[4, 12]]), np.zeros((1, 2), int), np.ones((1, 2), int)
    )
    places = []

    def model(tokens, at):
        places.append((tokens[:, 0].tolist(), at[:, 0].tolist()))
        return np.take_along_axis(tokens, at, 1)

    assert needles.predict(asked, model, crop=8).tolist() == [[4, 12]]
    assert places == [([0, 5], [4, 7])]


def test_no_crop_is_needed_up_to_its_length(data):
    asked = needles.questions(data, 1, 16, 3, 0)
    calls = []
    needles.predict(asked, lambda tokens, at: calls.append(tokens) or at, crop=16)
    assert calls[0] is asked.tokens


@pytest.mark.parametrize("length", [2, 9, 64, 1000])
def test_distance_edges_cover_every_distance(length):
    edges = bin_edges([1, 4], 2, length)
    assert edges[0] == 1 and edges[-1] == length and (np.diff(edges) > 0).all()
