"""Log-likelihoods of continuations equal those of the model's logits, whatever the batches, chunks and devices."""

import jax
import numpy as np
import pytest
import tiny

from pe_lab.errors import UserError
from pe_lab.evaluation.scoring import forward as forwards
from pe_lab.evaluation.scoring import likelihood as likelihoods
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.scoring.likelihood import Likelihood, Likelihoods, padded_length
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model
from pe_lab.positional import Alibi, Beta, DynamicNTK, Rope

LENGTH = 24
VOCABULARY = tiny.MODEL.vocab_size


def model(encoding=None) -> LanguageModel:
    found = tiny.checkpoint(encoding)
    return LanguageModel(found, found.layers)


def pairs(rows: int = 6, length: int = LENGTH) -> list[tuple[list[int], list[int]]]:
    """Contexts and continuations of all sizes, the longest sequence first and last."""
    rng = np.random.default_rng(rows)
    found = []
    for i in range(rows):
        text = rng.integers(0, VOCABULARY, length - 3 * (i % 3)).tolist()
        cut = int(rng.integers(1, len(text)))
        found.append((text[:cut], text[cut:]))
    return found


def log_probabilities(lm: LanguageModel, text: list[int]) -> np.ndarray:
    """[T, V] from the logits, in float64. Zeros follow the text: one compilation, and nothing looks ahead."""
    logits = np.asarray(lm.logits([*text, *[0] * (LENGTH - len(text))]))[0, : len(text)].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(lm: LanguageModel, context: list[int], continuation: list[int]) -> Likelihood:
    found = log_probabilities(lm, [*context, *continuation[:-1]])[len(context) - 1 :]
    total = found[np.arange(len(continuation)), continuation].sum()
    return Likelihood(float(total), bool((found.argmax(-1) == continuation).all()))


def agree(found: Likelihood, wanted: Likelihood, within: float = 1e-4) -> None:
    assert found.total == pytest.approx(wanted.total, abs=within) and found.greedy == wanted.greedy


def in_order(scorer: Likelihoods, asked) -> list[Likelihood]:
    return [likelihood for _, likelihood in sorted(scorer(asked))]


def test_likelihoods_equal_those_of_the_logits():
    lm = model()
    asked = pairs()
    # The likeliest continuation, and the same with another last token.
    context = asked[0][0][:3]
    greedy: list[int] = []
    for _ in range(5):
        greedy.append(int(log_probabilities(lm, [*context, *greedy])[-1].argmax()))
    asked += [(context, greedy), (context, [*greedy[:-1], (greedy[-1] + 1) % VOCABULARY])]
    found = in_order(Likelihoods(lm, devices=tiny.one_device()), asked)
    for likelihood, pair in zip(found, asked, strict=True):
        agree(likelihood, by_hand(lm, *pair))
    assert [one.greedy for one in found[-2:]] == [True, False]
    assert len({round(one.total, 3) for one in found}) == len(found)


def test_batches_devices_and_chunks_do_not_matter(monkeypatch):
    lm, asked = model(), pairs(7)
    wanted = in_order(Likelihoods(lm, devices=tiny.one_device()), asked)
    scorers = {
        "two at once": Likelihoods(lm, 2, tiny.one_device()),
        "all devices": Likelihoods(lm, devices=jax.devices()),
    }
    monkeypatch.setitem(forwards.CHUNK, "cpu", 8)
    monkeypatch.setattr(likelihoods, "_forward", lambda *shape, tensor: Forward(*shape, 16, tensor))
    scorers["chunk by chunk"] = Likelihoods(lm, devices=tiny.one_device())
    for scorer in scorers.values():
        for found, same in zip(in_order(scorer, asked), wanted, strict=True):
            agree(found, same)


def test_a_batch_has_as_many_sequences_as_a_device_is_good_for(monkeypatch):
    monkeypatch.setitem(forwards.BATCH_TOKENS, "cpu", 5 * 16)
    asked = [([i // 50, i % 50], [1, 2]) for i in range(8 * likelihoods.STEPS)]  # each padded to 16 tokens
    batches = Likelihoods(model(), devices=tiny.one_device()).batches(asked)
    # 4 sequences: the power of two below 5.
    assert [len(batch.sequences) for batch in batches] == [4 * likelihoods.STEPS] * 2


def test_a_context_is_read_once_for_all_its_last_tokens():
    scorer = Likelihoods(model(), devices=tiny.one_device())
    read = []
    scorer._forward.on_tokens = read.append
    context = list(range(12))
    asked = [(context, [token]) for token in (3, 1, 4)] + [([*context[:-1]], [context[-1], 5]), (context[:4], [9])]
    found = in_order(scorer, asked)
    assert sum(read) == 2 * 16  # two sequences, each padded to 16 tokens
    for likelihood, pair in zip(found, asked, strict=True):
        agree(likelihood, by_hand(scorer._lm, *pair))


def test_scores_do_not_depend_on_the_chunks_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr("pe_lab.model.loss.LOGITS", LENGTH * VOCABULARY // 3)
    lm = model()
    forward = Forward(Model(tiny.MODEL).config, devices=tiny.one_device())
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, LENGTH))
    wanted = log_probabilities(lm, tokens[0].tolist())
    targets = np.where(np.arange(LENGTH) % 2, wanted.argmax(-1), tokens[0])[None]  # every other one is the likeliest
    ((scores, likeliest),) = forward.scores(tiny.parameters(), tokens, np.arange(LENGTH)[None], targets, lm.layers)
    np.testing.assert_allclose(scores[0], wanted[np.arange(LENGTH), targets[0]], atol=1e-4)
    np.testing.assert_array_equal(likeliest[0], wanted.argmax(-1) == targets[0])
    assert likeliest[0, 1::2].all() and not likeliest[0, ::2].all()
    # Where all are equally likely, the first token is the likeliest, in any part.
    params = tiny.parameters()
    params = {
        **params,
        "token_embedder": {**params["token_embedder"], "embedding": 0 * params["token_embedder"]["embedding"]},
    }
    targets = np.arange(LENGTH)[None]
    ((scores, likeliest),) = forward.scores(params, tokens, np.arange(LENGTH)[None], targets, lm.layers)
    np.testing.assert_allclose(scores, -np.log(VOCABULARY), rtol=1e-6)
    assert likeliest[0].tolist() == [True] + [False] * (LENGTH - 1)


@pytest.mark.parametrize("encoding", [Rope(scaling=DynamicNTK(8, 2.0)), Alibi()], ids=["dynamic", "alibi"])
def test_padding_does_not_change_the_schedule_length(encoding):
    """An encoding that depends on the length uses the sequence's own, not the padded length."""
    lm = model(encoding)
    if isinstance(encoding, Alibi):
        lm = lm.with_positional(lm.layers, Beta(0.4, 8))
    assert lm.layers[0].follows_length
    asked = [(list(range(5)), [7, 8, 9, 10, 11, 12, 13])]  # 11 tokens are read, and padded to 16
    ((_, found),) = Likelihoods(lm, devices=tiny.one_device())(asked)
    losses = lm.loss_by_position([*asked[0][0], *asked[0][1]])[0]
    assert found.total == pytest.approx(-float(losses[4:].sum()), abs=1e-4)
    as_if = lm.at_length(16)
    ((_, other),) = Likelihoods(as_if, devices=tiny.one_device())(asked)
    assert abs(other.total - found.total) > 1e-3
    assert other.total == pytest.approx(
        -float(as_if.loss_by_position([*asked[0][0], *asked[0][1]])[0, 4:].sum()), abs=1e-4
    )


def test_a_pair_without_tokens_is_refused():
    scorer = Likelihoods(model(), devices=tiny.one_device())
    for pair, what in (([], [1]), "context"), (([1], []), "continuation"):
        with pytest.raises(UserError, match=f"Pair 1 has no token in its {what}"):
            list(scorer([([1], [2]), pair]))


def test_padded_lengths_are_few_and_waste_little():
    lengths = [padded_length(n) for n in range(1, 5000)]
    assert all(n <= padded <= max(16, 1.5 * n) for n, padded in enumerate(lengths, 1))
    assert len(set(lengths)) == 1 + 2 * 8 + 1  # 16, and two an octave up to 6144
