"""The harness's requests: texts scored and generated, how they begin, how chats become texts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from adapters import LM, MAX_LENGTH, adapter, language_model, with_beginning

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.language_model import LanguageModel

VOCABULARY = tiny.MODEL.vocab_size


def request(*arguments: Any) -> Any:
    """What the harness hands over, as far as a model looks at it."""
    return SimpleNamespace(args=arguments)


def scored(text: str | list[int], start: int) -> float:
    """Log-likelihood of a text from a position on, as the model's own losses have it; one length, one compilation."""
    ids = list(text.encode()) if isinstance(text, str) else text
    losses = LM.loss_by_position([*ids, *[0] * (MAX_LENGTH + 1 - len(ids))])[0]
    return -float(losses[start - 1 : len(ids) - 1].astype(np.float64).sum())


# ------------------------------------------------------------------------------------------------------------
# The interface


def test_log_likelihoods_of_texts():
    found = adapter().loglikelihood(
        [request("A context", " and more"), request("", "Alone"), request("Ends in a space ", "x"), request("é", "ü")],
        disable_tqdm=True,
    )
    wanted = [
        scored("A context and more", 9),
        scored([256, *b"Alone"], 1),  # the end of text stands before what has no context
        scored("Ends in a space x", 15),  # the space belongs to what is scored
        scored("éü", 2),
    ]
    assert [total for total, _ in found] == pytest.approx(wanted, abs=1e-4)
    assert all(greedy is False for _, greedy in found)


def test_long_contexts_are_cut_from_the_left_and_counted():
    model = adapter()
    long = "".join(chr(97 + i % 26) for i in range(60))
    fits = long[: MAX_LENGTH + 1 - 4]  # the last token is not read
    found = model.loglikelihood([request(long, "wxyz"), request(fits, "wxyz")], disable_tqdm=True)
    assert model.truncated == 1 and model.get_model_info()["truncated"] == 1
    assert found[0][0] == pytest.approx(scored((long + "wxyz")[-MAX_LENGTH - 1 :], MAX_LENGTH - 3), abs=1e-4)
    assert found[1][0] == pytest.approx(scored(fits + "wxyz", MAX_LENGTH - 3), abs=1e-4)
    with pytest.raises(UserError, match="33 to score, and max_length is 32: 'a' / 'aaaa"):
        model.loglikelihood([request("a", "a" * 33)], disable_tqdm=True)


def test_a_long_text_is_read_in_windows_that_predict_each_token_once():
    text = list(bytes(i % 251 for i in range(2 * MAX_LENGTH + 9)))
    model = adapter()
    string = SimpleNamespace(encode_prompt=lambda *_, **__: np.asarray(text))
    model._text = string
    ((total), empty) = model.loglikelihood_rolling([request("any"), request("any")], disable_tqdm=True)
    windows = [
        scored([256, *text[:MAX_LENGTH]], 1),
        scored(text[MAX_LENGTH - 1 : 2 * MAX_LENGTH], 1),
        scored(text[-MAX_LENGTH - 1 :], MAX_LENGTH + 1 - 9),  # a whole context, of which nine are scored
    ]
    assert total == empty == pytest.approx(sum(windows), abs=1e-4)
    assert model.truncated == 0


def test_an_empty_text_costs_nothing():
    assert adapter().loglikelihood_rolling([request("")], disable_tqdm=True) == [0]


def test_generation_is_the_models_own_until_a_stop_string():
    model = adapter(batch_size=4)
    prompts = ["One two", "A much longer prompt, of which the end is left", "", "Three"]
    settings = {"until": ["\0\0"], "max_gen_toks": 12}
    found = model.generate_until([request(prompt, settings) for prompt in prompts], disable_tqdm=True)
    ids = [list(prompt.encode())[-(MAX_LENGTH - 12) :] or [256] for prompt in prompts]
    assert found == LM.generate(ids, 12, text=True) and model.truncated == 1
    assert len(set(found)) == 4
    # Two of its own characters, where they first occur.
    stop = found[1][3:5]
    asked = [request(prompt, {"until": stop, "max_gen_toks": 12}) for prompt in prompts]
    assert model.generate_until(asked, disable_tqdm=True) == [text.split(stop)[0] for text in found]


def test_how_generation_is_asked_for():
    model = adapter(max_gen_toks=7)
    assert model._settings({"until": "\n"}) == (["\n", "<|endoftext|>"], 7, {})
    assert model._settings({"until": None, "max_new_tokens": 3, "temperature": 0.0}) == (["<|endoftext|>"], 3, {})
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "num_beams": 1}
    assert model._settings(drawn)[2] == {"temperature": 0.5, "top_p": 0.9}
    assert model._settings({"do_sample": False, "temperature": 0.5})[2] == {}
    with pytest.raises(UserError, match="num_beams=4, which pe_lab cannot do"):
        model._settings({"num_beams": 4})
    with pytest.raises(UserError, match="32 new tokens are asked for, and max_length is 32"):
        model.generate_until([request("a", {"max_gen_toks": 32})], disable_tqdm=True)


def test_what_is_known_is_told_to_the_harness_cache():
    model, told = adapter(), []
    model.cache_hook = SimpleNamespace(add_partial=lambda *what: told.append(what))
    (found,) = model.loglikelihood([request("A context", " and more")], disable_tqdm=True)
    (total,) = model.loglikelihood_rolling([request("A context and more")], disable_tqdm=True)
    assert told == [
        ("loglikelihood", ("A context", " and more"), found),
        ("loglikelihood_rolling", ("A context and more",), total),
    ]


# ------------------------------------------------------------------------------------------------------------
# Tokenizers and chats

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_text_begins_once():
    model = adapter(language_model(with_beginning()))
    assert (model.prefix_token_id, model.eot_token_id) == (0, 1)
    bare = [2, 3, 4]  # ▁ab
    assert model.tok_encode("ab") == [0, *bare]
    assert model.tok_encode("<s>ab") == model.tok_encode("<s>ab", add_special_tokens=False)
    assert model.tok_encode("<s>ab").count(0) == 1
    assert model.tok_encode("ab", add_special_tokens=False) == bare
    assert model.tok_encode("ab", left_truncate_len=2) == bare[-2:]
    assert adapter(model.lm, add_bos_token=False).tok_encode("ab") == bare
    assert adapter(model.lm, prefix_token_id=1).prefix_token_id == 1
    assert model.tokenizer_name != adapter().tokenizer_name


@pytest.mark.parametrize("drops", [True, False])
def test_a_generated_text_is_decoded_by_itself_and_drawn_for_itself(drops, monkeypatch):
    model, asked = adapter(language_model(with_beginning() if drops else ByteTokenizer()), batch_size=2, seed=7), []

    def generate(lm, prompts, *_, **settings):
        asked.append((len(prompts), settings["seed"], settings["temperature"]))
        return [" b"] * len(prompts)

    monkeypatch.setattr(LanguageModel, "generate", generate)
    repeated = [request("a", {"max_gen_toks": 1, "do_sample": True, "temperature": 0.5})] * 5
    assert model.generate_until(repeated, disable_tqdm=True) == ["b" if drops else " b"] * 5
    assert [(rows, temperature) for rows, _, temperature in asked] == [(1, 0.5)] * 5
    assert len({seed for _, seed, _ in asked}) == 5  # a row draws by its number in the batch and the seed


@pytest.mark.slow
def test_what_is_drawn_does_not_depend_on_the_batch():
    drawn = {"max_gen_toks": 6, "do_sample": True, "temperature": 2.0}
    asked = [request(text, drawn) for text in ("one", "much longer than the others", "a third", "one")]
    found = adapter(batch_size=4, seed=3).generate_until(asked, disable_tqdm=True)
    assert adapter(batch_size=1, seed=3).generate_until(asked, disable_tqdm=True) == found
    # Neither on those after it, nor on how long they are.
    assert adapter(seed=3).generate_until(asked[:1], disable_tqdm=True) == found[:1]
    assert found[0] != found[3] and adapter(seed=4).generate_until(asked, disable_tqdm=True) != found


def test_a_beginning_that_is_asked_for_is_put_there_once():
    plain, bos = ByteTokenizer(), VOCABULARY - 1

    class WithBos(ByteTokenizer):
        bos_id = bos

        def decode(self, ids, **more):
            return "<b>" if list(ids) == [bos] else super().decode(ids, **more)

    lm = language_model(WithBos())
    ids = plain.encode_prompt("ab").tolist()
    assert adapter(lm).tok_encode("ab") == ids  # it is not this tokenizer's habit
    model = adapter(lm, add_bos_token=True)
    assert model.tok_encode("ab") == model.tok_encode("ab", add_special_tokens=True) == [bos, *ids]
    assert model.tok_encode("ab", add_special_tokens=False) == ids and model.tok_encode("") == [bos]
    assert model.tok_encode("ab", left_truncate_len=2) == ids
    habit = language_model(with_beginning())
    for text in ("ab", "<s>ab"):
        assert adapter(habit, add_bos_token=True).tok_encode(text).count(0) == 1
    never = adapter(habit, add_bos_token=False)
    assert 0 not in [*never.tok_encode("ab"), *never.tok_encode("ab", add_special_tokens=True)]
    with pytest.raises(UserError, match="add_bos_token=True, and the tokenizer has no"):
        adapter(add_bos_token=True)


def test_messages_become_a_text():
    model = adapter(language_model(with_beginning(TEMPLATE)), max_length=300)
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes, "}
    assert model.apply_chat_template([user]) == "[user]hi[end][assistant]"
    assert model.apply_chat_template([user, answer], add_generation_prompt=False) == "[user]hi[end][assistant]yes,"
    assert model.apply_chat_template([{"role": "system", "content": "be"}, user]) == "[user]hi[end][assistant]"
    assert model.chat_template(True) == "[user]...[end][assistant]" and model.chat_template(False) is None
    with pytest.raises(UserError, match="which has no name"):
        model.chat_template("tools")
    with pytest.raises(UserError, match="no chat template"):
        adapter().apply_chat_template([user])
