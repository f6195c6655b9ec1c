"""The harness's interface to a model, and a model measured through the harness, on local tasks of each kind."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from lm_eval_tasks import NAMES, TASKS, write_tasks

from pe_lab.config import UserError
from pe_lab.data.companions import Companions
from pe_lab.data.hf_tokenizer import HuggingFaceTokenizer
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.evaluation import task_lists
from pe_lab.evaluation.likelihood import Likelihood
from pe_lab.evaluation.lm_eval import PeLabLM, evaluate_lm_eval, main, with_defaults
from pe_lab.evaluation.task_lists import TASK_LISTS, expand_tasks, open_tasks
from pe_lab.language_model import LanguageModel, load
from pe_lab.positional import NoPE, Yarn

ROOT = Path(__file__).parent.parent.parent
MAX_LENGTH = 32
VOCABULARY = tiny.MODEL.vocab_size


def language_model(tokenizer: Any = None, uniform: bool = False) -> LanguageModel:
    found = tiny.checkpoint()
    if uniform:
        params = {
            **found.params,
            "trunk": {**found.params["trunk"], "embedding": 0 * found.params["trunk"]["embedding"]},
        }
        found = dataclasses.replace(found, params=params)
    return LanguageModel(found, found.layers, found.schedule.generalize(), tokenizer or ByteTokenizer())


LM = language_model()


def adapter(lm: LanguageModel = LM, **settings: Any) -> Any:
    return PeLabLM(lm, **{"max_length": MAX_LENGTH, "devices": tiny.one_device(), **settings})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield write_tasks(tmp_path_factory.mktemp("tasks"))


def request(*arguments: Any) -> Any:
    """What the harness hands over, as far as a model looks at it."""
    return SimpleNamespace(args=arguments)


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


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


def with_beginning(template: str | None = None) -> HuggingFaceTokenizer:
    """Characters, with <s> before every prompt, and the space that a text begins with left out when it is decoded."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pieces = ["<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz[]<>/|"]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    configuration = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {"tokenizer_config.json": json.dumps(configuration).encode()}
    return HuggingFaceTokenizer(tokenizer.to_str(), Companions("a test", files))


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
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes, "}
    assert model.apply_chat_template([user]) == "[user]hi[end][assistant]"
    assert model.apply_chat_template([user, said], add_generation_prompt=False) == "[user]hi[end][assistant]yes,"
    assert model.apply_chat_template([{"role": "system", "content": "be"}, user]) == "[user]hi[end][assistant]"
    assert model.chat_template(True) == "[user]...[end][assistant]" and model.chat_template(False) is None
    with pytest.raises(UserError, match="which has no name"):
        model.chat_template("tools")
    with pytest.raises(UserError, match="no chat template"):
        adapter().apply_chat_template([user])


# ------------------------------------------------------------------------------------------------------------
# Settings


def test_how_a_model_is_asked_for():
    model = PeLabLM(
        LM, positional="yarn:factor=2", logit_scale=1.5, max_length="4x", device="cuda:0", batch_size="auto:4"
    )
    assert model.max_length == 4 * tiny.LENGTH and model.batch_size is None and PeLabLM(LM).max_length == tiny.LENGTH
    assert [layer.encoding.scaling for layer in model.lm.layers] == [Yarn(2, tiny.LENGTH)] * 2
    assert {layer.logit_scale for layer in model.lm.layers} == {1.5}
    assert {layer.encoding for layer in PeLabLM(LM, drop=True).lm.layers} == {NoPE()}
    assert "yarn" in model.get_model_info()["positional"][0]
    for settings, message in (
        ({"max_lenght": 9}, "Did you mean 'max_length'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": "long"}, "max_length: 'long' is no length"),
        ({"max_gen_toks": "abc"}, "max_gen_toks is 'abc'; give a whole number from 1"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"seed": "abc"}, "seed is 'abc'; give a whole number"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": True}, "seed is True"),
        ({"prefix_token_id": "abc"}, "prefix_token_id is 'abc'; give a whole number from 0 to 383"),
        ({"prefix_token_id": VOCABULARY}, "prefix_token_id is 384"),
        ({"logit_scale": "fitted"}, "logit_scale is 'fitted'; give a number above 0"),
        ({"logit_scale": 0}, "logit_scale is 0"),
        ({"drop": "maybe"}, "drop is 'maybe'; give True or False"),
        ({"add_bos_token": "maybe"}, "add_bos_token is 'maybe'; give True or False"),
    ):
        with pytest.raises(UserError, match=message):
            PeLabLM(LM, **settings)
    with pytest.raises(UserError, match="pretrained=runs/NAME"):
        PeLabLM()
    with pytest.raises(UserError, match="without a tokenizer"):
        PeLabLM(dataclasses.replace(LM, tokenizer=None))


def test_the_command_line_has_our_defaults():
    given = ["--tasks", "a"]
    assert with_defaults(given) == [*given, "--model", "pe_lab", "--batch_size", "auto"]
    assert with_defaults(["--model=hf", "-b", "2"]) == ["--model=hf", "-b", "2"]
    for others in (["ls", "tasks"], ["--config", "a.yaml"], ["--help"], []):
        assert with_defaults(others) == others


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ValueError("Tasks not found: a"), "Tasks not found: a. `python -m pe_lab.evaluation.lm_eval ls tasks`"),
        (ConnectionError("Couldn't reach 'b' on the Hub"), "Couldn't reach 'b' on the Hub. Where there is no network"),
        (UserError("batch_size is 0"), "error: batch_size is 0"),
    ],
)
def test_a_command_that_fails_says_why(raised, message, monkeypatch, capsys):
    monkeypatch.setattr("multiprocessing.set_start_method", lambda *_, **__: None)

    def cli_evaluate():
        assert sys.argv == ["lm-eval", "--tasks", "a", "--model", "pe_lab", "--batch_size", "auto"]
        raise raised

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", cli_evaluate)
    before = list(sys.argv)
    assert main(["--tasks", "a"]) == 2 and message in capsys.readouterr().err and sys.argv == before


@pytest.mark.slow
def test_the_harnesses_command_line_measures_ours(tasks, tmp_path):
    model = shutil.copytree(ROOT / "tests" / "data" / "hf" / "llama", tmp_path / "model")
    with_beginning().export(model)
    arguments = ["--model_args", f"pretrained={model},positional=yarn:factor=2,max_length=40", "--tasks", "local_group",
                 "--include_path", str(tasks), "--limit", "4", "--output_path", str(tmp_path / "out")]  # fmt: skip
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pe_lab.evaluation.lm_eval", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|local_group|" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["config"]["positional"] == ["rope(base=500) + yarn(factor=2, original_length=256)"]
    assert found["config"]["max_length"] == 40 and found["config"]["truncated"] > 0
    assert found["config"]["pretrained"] == str(model) and found["config"]["batch_size"] == "auto"
    lm = load(model).with_positional("yarn:factor=2")
    rows = evaluate_lm_eval(lm, ["local_group"], tasks, limit=4, max_length=40, devices=tiny.one_device())
    assert [row["task"] for row in rows] == ["local_choices"] * 2 + ["local_last_words"] * 2 + ["local_group"]
    for row in rows:
        assert found["results"][row["task"]][f"{row['metric']},none"] == pytest.approx(row["score"], rel=1e-4)
    assert rows[-1]["samples"] == 8
    # Bootstrapped, in processes of its own.
    assert found["results"]["local_last_words"]["perplexity_stderr,none"] > 0


# ------------------------------------------------------------------------------------------------------------
# Tasks


def test_a_model_that_knows_nothing_scores_chance(tasks):
    """Of a uniform distribution every score follows from the lengths of the texts."""
    came = []
    uniform = language_model(uniform=True)
    settings = {"max_length": MAX_LENGTH, "devices": tiny.one_device()}
    rows = evaluate_lm_eval(uniform, NAMES[:3], tasks, measured=came.append, **settings)
    assert [row for some in came for row in some] == rows and len(came) == 3
    scores = {(row["task"], row["metric"]): row["score"] for row in rows}
    choices = documents("choices")
    costs = [[len(f" {choice}".encode()) for choice in document["choices"]] for document in choices]
    right = [document["answer"] == int(np.argmin(cost)) for document, cost in zip(choices, costs, strict=True)]
    assert scores["local_choices", "acc"] == np.mean(right)
    last = [len(" " + document["text"].split(" ")[-1]) for document in documents("last_words")]
    assert scores["local_last_words", "perplexity"] == pytest.approx(VOCABULARY ** np.mean(last), rel=1e-4)
    # Each byte is predicted once, however the passage is cut into windows.
    assert scores["local_passages", "bits_per_byte"] == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    for row in rows:
        assert (row["samples"], row["version"], row["num_fewshot"], row["harness"]) == (30, 1.0, 0, "0.4.13")
        assert row["max_length"] == MAX_LENGTH and row["higher_is_better"] is ("acc" in row["metric"])
        assert (row["truncated"] > 0) == (row["task"] != "local_passages")
        assert (row["stderr"] is None) == (row["task"] == "local_passages")


@pytest.mark.parametrize("wanted", [1.0, 0.0])
def test_a_model_that_knows_the_answers(tasks, monkeypatch, wanted):
    right = {f"Question: {d['question']}\nAnswer:": f" {d['choices'][d['answer']]}" for d in documents("choices")}
    known = {(bytes(question + answer, "utf-8")) for question, answer in right.items()}

    def oracle(scorer, batch):
        for text in batch.texts:
            for pair, first, continuation in text.asked:
                knows = bytes([*text.tokens[: first + 1], *continuation]) in known
                yield pair, Likelihood(0.0 if knows == bool(wanted) else -1000.0, False)

    monkeypatch.setattr("pe_lab.evaluation.likelihood.Likelihoods.read", oracle)
    rows = evaluate_lm_eval(LM, ["local_choices"], tasks, max_length=300, devices=tiny.one_device())
    assert [row["score"] for row in rows] == [wanted, wanted]


def test_generated_answers_are_compared(tasks, monkeypatch):
    answers = {f"Question: {d['question']}\nAnswer:": f" {d['answer'].upper()}" for d in documents("questions")}

    def generate(self, prompts, new_tokens, stop, **_):
        assert new_tokens == 16 and stop == ["\n", "<|endoftext|>"]
        texts = [answers[bytes(prompt).decode()] for prompt in prompts]
        return [text if len(text) % 2 else " wrong" for text in texts]

    monkeypatch.setattr(LanguageModel, "generate", generate)
    (row,) = evaluate_lm_eval(LM, ["local_questions"], tasks, limit=10, max_length=300, devices=tiny.one_device())
    some = list(answers.values())[:10]
    assert row["samples"] == 10 and row["metric"] == "exact_match"
    assert row["score"] == np.mean([len(text) % 2 for text in some]) and 0 < row["score"] < 1


def test_what_cannot_be_opened_says_why(tasks, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    lines = ["task: far", "dataset_path: nobody/nothing", "output_type: generate_until", "test_split: test"]
    (tmp_path / "far.yaml").write_text("\n".join([*lines, "doc_to_text: a", "doc_to_target: b"]))
    with pytest.raises(
        UserError, match=r"'far' cannot be opened, with its dataset 'nobody/nothing': .*test: /absolute"
    ):
        open_tasks(["far"], tmp_path)
    with pytest.raises(UserError, match="folder of tasks 'nowhere' is not there"):
        open_tasks(["far"], "nowhere")
    without_the_others = task_lists._task_manager
    monkeypatch.setattr(task_lists, "_task_manager", lambda folder, *_: without_the_others(folder, False))
    for name, message in (("local_choises", "Did you mean 'local_choices'"), ("zzz", "ls tasks` lists them all")):
        with pytest.raises(UserError, match=f"has no task '{name}' .nor in .*{message}"):
            open_tasks([name], tasks)


def test_lists_of_tasks():
    assert expand_tasks(["DROPE-six", "mine", "piqa"]) == [*TASK_LISTS["droPE-six"], "mine"]
    assert len(expand_tasks(list(TASK_LISTS))) == 12 and len(TASK_LISTS["partial-rope-ten"]) == 10
    with pytest.raises(UserError, match="'drope_six'. Did you mean 'droPE-six'"):
        expand_tasks(["drope_six"])
    with pytest.raises(UserError, match="No task is named"):
        expand_tasks([" "])
    assert expand_tasks(["drop"]) == ["drop"]  # near a list's name, and a task


@pytest.mark.slow
def test_the_harness_has_the_tasks_of_the_lists():
    known = task_lists._task_manager(None, True).task_index
    assert set(expand_tasks(list(TASK_LISTS))) <= set(known)
    with pytest.raises(UserError, match="has no task 'arc_easi'. Did you mean 'arc_easy'"):
        open_tasks(["arc_easi"])
