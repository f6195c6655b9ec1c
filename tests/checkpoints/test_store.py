"""The content of a checkpoint, the paths that name it, and the errors for one that cannot be read."""

import json
import re
import resource
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import compilations_kept, finish, reseal, start_together, tiny, trained  # noqa: F401

import pe_lab
from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.checkpoints.locating import (
    absent_arrays,
    find_checkpoints,
    read_manifest,
    read_metadata,
    resolve,
    tokenizer_directory,
)
from pe_lab.checkpoints.native import NativeSource
from pe_lab.checkpoints.store import Store, metadata_of, templates
from pe_lab.config import CheckpointConfig, MeshConfig, ModelConfig, to_json
from pe_lab.errors import ConfigError, DataError, SaveFailed, UserError
from pe_lab.identity import config_hash
from pe_lab.model import Model
from pe_lab.parallel import make_mesh
from pe_lab.positional import (
    Alibi,
    Layer,
    Layout,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
    build_schedule,
    from_canonical,
    layers,
)
from pe_lab.storage import check_checkpoints

LEAST = {"id": "0", "phase": "pretrain", "step": 0, "training_length": 16, "lineage": []}  # that readers rely on

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture
def run(trained):  # noqa: F811
    return trained


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_a_checkpoint_holds_all_that_training_is(run, tmp_path):
    config = tiny(tmp_path)
    checkpoint = open_checkpoint(run)
    metadata = checkpoint.metadata
    assert {
        "id", "run", "phase", "phase_index", "step", "tokens", "training_length", "config", "config_hash", "lineage",
        "mixture", "tokenizer", "vocab_size", "versions", "data_state", "random", "model", "layers",
    } <= metadata.keys()  # fmt: skip
    assert (metadata["run"], metadata["phase"], metadata["step"], metadata["tokens"]) == ("tiny", "recalibrate", 6, 768)
    assert metadata["config"] == json.loads(json.dumps(to_json(config)))
    assert metadata["config_hash"] == config_hash(config)
    assert metadata["training_length"] == 16
    assert metadata["data_state"]["batches"] == 6
    assert metadata["lineage"][-1]["id"] == metadata["id"] != metadata["lineage"][-2]["id"]
    assert metadata["random"]["key"] == np.asarray(jax.random.key_data(jax.random.key(config.seed))).tolist()
    assert metadata["vocab_size"] == checkpoint.model.vocab_size == 384
    assert checkpoint.layers == (Layer(NoPE()), Layer(NoPE()))
    assert checkpoint.model.d_ff == 32 and checkpoint.model.head_dim == 8
    items = {p.name for p in checkpoint.path.iterdir() if p.is_dir()}
    assert {"params", "optimizer", "metadata"} <= items


def test_what_training_attended_by_is_not_asked_of_the_reader(copy):
    """A model trained by a TPU's kernel is read wherever it is opened, by whatever runs there."""
    where = open_checkpoint(copy).path / "metadata" / "metadata"
    metadata = json.loads(where.read_text())
    metadata["model"]["attention"] = "splash"
    where.write_text(json.dumps(metadata))
    reseal(where.parents[1])
    checkpoint = open_checkpoint(copy)
    assert checkpoint.metadata["model"]["attention"] == "splash" and checkpoint.model.attention == "auto"
    assert NativeSource(copy).model.attention == "auto"
    assert np.isfinite(pe_lab.load(copy).logits(np.arange(5))).all()


def test_a_path_of_any_kind_leads_to_a_checkpoint(run, monkeypatch):
    last = run / "recalibrate" / "checkpoints"
    for path in (run, run / "recalibrate", last, last / "6", str(run) + "/"):
        assert resolve(path) == (last, 6)
    first = run / "pretrain" / "checkpoints"
    assert resolve(run / "pretrain") == (first, 8)
    assert resolve(first / "4") == (first, 4)
    assert find_checkpoints(run) == [first / "8", last / "6"]
    assert find_checkpoints(run / "pretrain") == [first / "8"]
    monkeypatch.chdir(last)
    assert open_checkpoint("4").step == 4
    assert tokenizer_directory(Path("4")) == run / "tokenizer"


def test_phases_are_found_in_the_order_they_ran_not_of_the_alphabet(copy):
    (copy / "recalibrate").rename(copy / "a_later_phase")
    assert [p.parts[-3] for p in find_checkpoints(copy)] == ["pretrain", "a_later_phase"]
    assert resolve(copy)[0].parent.name == "a_later_phase"


def test_a_checkpoint_that_was_never_committed_is_not_seen(copy):
    step = copy / "recalibrate" / "checkpoints" / "6"
    step.rename(step.with_name("6.orbax-checkpoint-tmp"))
    assert resolve(copy / "recalibrate")[1] == 4
    store = Store(copy / "recalibrate" / "checkpoints")
    assert store.steps() == [2, 4]
    store.close()


def test_nothing_there(tmp_path, copy):
    with pytest.raises(UserError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="Give a run directory, a phase of it, or one step's directory"):
        open_checkpoint(tmp_path)
    external = tmp_path / "external" / "checkpoints" / "7"
    external.mkdir(parents=True)
    (external / "model.safetensors").touch()
    for path in (external, tmp_path / "external"):
        with pytest.raises(UserError, match="There is no checkpoint at"):
            open_checkpoint(path)
    assert find_checkpoints(tmp_path / "external") == []
    for item in ("metadata", "params"):
        (external / item).mkdir()
    with pytest.raises(UserError, match="There is no checkpoint at"):  # its manifest is missing
        open_checkpoint(external)


def data_files(directory: Path) -> list[Path]:
    """Smallest first; of arrays, those that hold the numbers."""
    directory = directory / "d" if (directory / "d").is_dir() else directory
    return sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


# Orbax leaves reads under way behind when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("item", ["params", "metadata"])
@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_damage_is_said_in_one_line(copy, item, how):
    step = copy / "recalibrate" / "checkpoints" / "6"
    file = data_files(step / item)[-1]
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"recalibrate/checkpoints/6' (is damaged|cannot be read)") as error:
        open_checkpoint(step)
    assert "\n" not in str(error.value)
    assert open_checkpoint(copy).step == 4  # the last one that is whole


def test_another_format_is_named(copy):
    step = copy / "recalibrate" / "checkpoints" / "6"
    (file,) = [p for p in data_files(step / "metadata") if "format" in p.read_text()]
    file.write_text(file.read_text().replace('"format": 1', '"format": 99').replace('"format":1', '"format":99'))
    with pytest.raises(UserError, match="has format 99; this version reads 1"):
        read_metadata(step)


DESCRIPTIONS = {
    "nope": NoPE(),
    "yarn": Rope(scaling=Yarn(factor=4.0, original_length=1024)),
    "p-rope": Rope(base=5e5, fraction=0.75),
    "partial": PartialRope(fraction=0.5),
    "alibi": Alibi(),
    "mixed": [Layer(Rope(), window=8, logit_scale=1.25), Layer(NoPE())],
}


@pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_schedule_comes_back_bit_by_bit(tmp_path, description):
    config = ModelConfig(
        vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=1, head_dim=8, dtype="float32"
    )
    model, described = Model(config), layers(description, 2)
    params = model.init(jax.random.key(1))
    schedule = build_schedule(described, 2, 1, 8)
    store = Store(tmp_path / "checkpoints")
    store.save(0, params, None, metadata_of(config, described, **LEAST))
    store.wait()
    store.close()
    back = open_checkpoint(tmp_path)
    assert isinstance(back, Checkpoint) and back.layers == described and back.model == model.config
    rebuilt = build_schedule(back.layers, 2, 1, 8)
    for name in ("inv_freq", "gain", "fixed_freq", "alibi_slope", "logit_scale"):
        array, restored = getattr(schedule, name), getattr(rebuilt, name)
        assert restored.dtype == array.dtype and np.asarray(restored).tobytes() == array.tobytes(), name
    assert rebuilt.structure == schedule.structure and rebuilt.same_rotation == schedule.same_rotation
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back.params, params))


def test_weights_arrive_on_the_mesh_that_was_asked_for(run):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread, whole = open_checkpoint(run, mesh=mesh), open_checkpoint(run)
    up = spread.params["layers"]["mlp"]["up"]
    assert len(up.sharding.device_set) == 8 and up.addressable_shards[0].data.shape == (2, 8, 16)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), spread.params, whole.params)
    )


def test_a_save_under_way_does_not_see_the_next_steps(tmp_path):
    """Training goes on, into the very memory that is being saved, while the files are written."""
    size, steps = 300_000, 5
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"a": jnp.zeros((size,)), "b": jnp.zeros((2, size))}
    config = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    described = layers("nope", 2)
    store = Store(tmp_path / "checkpoints", CheckpointConfig(keep=steps).kept)
    for step in range(1, steps + 1):
        state = advance(state)
        store.save(step, state, state, metadata_of(config, described))
        for _ in range(3):  # these are not saved
            state = advance(state)
        state = jax.tree.map(lambda x: x - 3, state)
    store.wait()
    template = templates(jax.eval_shape(lambda: state), jax.tree.map(lambda x: x.sharding, state))
    assert store.steps() == list(range(1, steps + 1))
    for step in store.steps():
        for tree in store.restore(step, template, template):
            assert all((np.asarray(x) == step).all() for x in jax.tree.leaves(tree)), step
    store.close()


def test_only_the_last_few_are_kept_and_later_ones_can_be_set_aside(tmp_path):
    config = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    store = Store(tmp_path / "checkpoints", CheckpointConfig(keep=3).kept)
    for step in (0, 5, 10, 15, 20):
        store.save(step, {"a": jnp.ones(3)}, None, metadata_of(config, layers("nope", 2)))
    store.wait()
    assert store.steps() == [10, 15, 20]
    store.set_aside_after(10)
    assert store.steps() == [10]
    aside = sorted((store.directory.parent / "unreadable").iterdir())
    assert [path.name.split("-")[0] for path in aside] == ["15", "20"]
    assert all((path / "params").is_dir() for path in aside)  # whole as they were: nothing is deleted
    store.save(15, {"a": jnp.zeros(3)}, None, metadata_of(config, layers("nope", 2)))
    store.wait()
    template = templates({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}, {"a": jnp.ones(3).sharding})
    assert (np.asarray(store.restore(15, template)[0]["a"]) == 0).all()
    store.close()


def small_store(directory: Path, retention: CheckpointConfig = CheckpointConfig()):  # noqa: B008
    """A store, and a function that saves arrays of a value at a step."""
    config = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    store = Store(directory / "checkpoints", retention.kept)

    def save(step: int, value: float = 1.0, **metrics: float) -> None:
        described = metadata_of(config, layers("nope", 2))
        store.save(step, {"a": jnp.full(3000, value)}, None, described, metrics)

    return store, save


def test_retention_keeps_the_latest_multiples_milestones_and_the_best(tmp_path):
    store, save = small_store(tmp_path, CheckpointConfig(keep_every=20, milestones=(15,), best="validation_loss"))
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (20, 4.0), (25, 1.0), (30, 5.0), (35, 6.0)):
        save(step, validation_loss=loss)
    store.wait()
    assert store.steps() == [10, 15, 20, 30, 35]
    store.close()


def test_a_checkpoint_that_a_killed_process_did_not_delete_is_deleted_on_demand(tmp_path, monkeypatch):
    """A process that is killed after the commit of step 4, before the deletion of step 1."""
    store, save = small_store(tmp_path, CheckpointConfig(keep=3))
    for step in (1, 2, 3, 4):
        if step == 4:
            store.wait()
            monkeypatch.setattr(store, "delete_old", lambda: None)
        save(step)
    store.wait()
    store.close()
    assert store.steps() == [1, 2, 3, 4]
    after = Store(store.directory, CheckpointConfig(keep=3).kept)
    assert after.steps() == [1, 2, 3, 4]  # the newest may be damaged: nothing is deleted before it was restored
    after.delete_old()
    assert after.steps() == [2, 3, 4]


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b?", "[!x]", "**", "%20{a,b}", "~x", "new\nline", "ünï", "a:b#c", " "])
def test_any_name_of_a_directory_is_taken_as_it_is(tmp_path, name):
    (tmp_path / "lr1" / "checkpoints").mkdir(parents=True)  # which `lr[1e-3]` matches as a pattern
    store, save = small_store(tmp_path / name)
    save(1, 3.0)
    store.wait()
    template = templates({"a": jax.ShapeDtypeStruct((3000,), jnp.float32)}, {"a": jnp.ones(3).sharding})
    assert (np.asarray(store.restore(1, template)[0]["a"]) == 3).all()
    assert absent_arrays(store.directory / "1", read_manifest(store.directory / "1")) == []
    store.close()


def test_a_save_of_which_nothing_can_be_read_is_reported(tmp_path, monkeypatch):
    """As if Orbax merged nothing."""
    from orbax.checkpoint._src.serialization import ocdbt_utils

    async def nothing(*args, **kwargs):
        pass

    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", nothing)
    store, save = small_store(tmp_path)
    save(1)
    with pytest.raises(SaveFailed, match="Orbax has written no params.a that can be read"):
        store.wait()
    assert store.steps() == []
    store.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [("a\\b", "cannot take this name"), ("\udcff", "cannot take this name"), ("x" * 256, "too long")]
    + [("x" * 200 + "/" + "/".join(["y" * 200] * 20), "too long")],
)
def test_a_directory_that_cannot_have_checkpoints_is_refused(tmp_path, name, says):
    with pytest.raises(ConfigError, match=says):
        check_checkpoints("--workdir", tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_is_reported_and_leaves_the_earlier_ones(tmp_path):
    """The limit on the size of a file makes real writes fail, in Orbax's threads."""
    store, save = small_store(tmp_path)
    save(5)
    store.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        save(10)
        with pytest.raises(SaveFailed, match=r"Checkpoint 10 of '.*' could not be written \("):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert store.steps() == [5] and [path.name for path in store.directory.iterdir()] == ["5"]
    store.wait()  # a failure is raised once
    save(15, 2.0)
    store.wait()
    assert store.steps() == [5, 15] and store.damage(15) == ""
    store.close()


def test_nothing_is_saved_if_what_must_come_first_cannot_be_written(tmp_path):
    store, save = small_store(tmp_path)
    save(5)

    def before() -> None:
        raise DataError("metrics.jsonl cannot be written (No space left on device).")

    with pytest.raises(SaveFailed, match=r"Checkpoint 10 of '.*' was not written \(metrics.jsonl .* on device\)\)\."):
        store.save(10, {"a": jnp.ones(3)}, None, {}, before=before)
    store.wait()
    assert [path.name for path in store.directory.iterdir()] == ["5"]
    store.close()


FAILS_IN_ONE = """
import resource, signal, sys, time
from pe_lab.parallel import start_processes
start_processes()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from pe_lab.checkpoints.store import Store
from pe_lab.errors import SaveFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
values = np.arange(8000, dtype=np.float32)
tree = {"a": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}
store = Store("checkpoints")
free = resource.getrlimit(resource.RLIMIT_FSIZE)
for step in (5, 10, 15):
    if step == 10 and jax.process_index() == int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, free[1]))
    began = time.monotonic()
    try:
        store.save(step, tree, None, {"format": 1, "step": step})
        store.wait()
    except SaveFailed as failure:
        print(f"{failure} after {time.monotonic() - began:.0f} s")
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
print(store.steps(), store.damage(15) == "")
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_in_one_of_two_processes_fails_in_both_at_once(tmp_path, failing):
    """With Orbax's own barriers the other one waits for 20 minutes. 8 s each."""
    (tmp_path / "fails_in_one.py").write_text(FAILS_IN_ONE)
    for out in finish(start_together(["fails_in_one", str(failing)], [tmp_path] * 2), patience=120):
        failed, said, *_ = [line for line in out.splitlines() if "Gloo" not in line]
        assert re.fullmatch(r"Checkpoint 10 of '.*' could not be written \(.*\)\. after \d s", failed), out
        assert said == "[5, 15] True", out


def test_what_a_killed_save_or_deletion_leaves_is_removed(tmp_path):
    store, save = small_store(tmp_path)
    save(5)
    store.close()
    for name in ("10.saving", "10.saving.orbax-checkpoint-tmp", "0.deleting"):
        (store.directory / name / "params").mkdir(parents=True)
    assert Store(store.directory, read_only=True).steps() == [5] and len(list(store.directory.iterdir())) == 4
    assert Store(store.directory).steps() == [5] and len(list(store.directory.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout("interleaved"), Layout("half", rotated=4), Layout("interleaved", rotated=4)])
def test_a_checkpoint_of_another_layout_opens_in_ours(run, tmp_path, layout):
    """Weights as their makers pair them; who opens them finds them as pe_lab pairs, with the same logits."""
    ours = open_checkpoint(run / "pretrain")
    theirs = jax.tree.map(np.asarray, ours.params)
    attention = theirs["layers"]["attention"]
    for name in ("query", "key"):
        attention[name] = from_canonical(attention[name], layout)
        scale = attention[f"{name}_norm"]["scale"] + np.arange(8, dtype=np.float32)  # so that its order matters
        ours.params["layers"]["attention"][f"{name}_norm"]["scale"] = jnp.asarray(scale)
        attention[f"{name}_norm"]["scale"] = from_canonical(scale, layout)
    metadata = {k: ours.metadata[k] for k in LEAST}
    store = Store(tmp_path / "other" / "checkpoints")
    store.save(0, theirs, None, metadata_of(ours.model, ours.layers, layout, **metadata))
    store.wait()
    store.close()
    opened = open_checkpoint(tmp_path / "other")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), opened.params, ours.params))
    assert not np.array_equal(theirs["layers"]["attention"]["query"], ours.params["layers"]["attention"]["query"])
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    schedule = build_schedule(ours.layers, ours.model.heads, ours.model.kv_heads, ours.model.head_dim)
    logits = [Model(c.model).apply(c.params, tokens, None, None, schedule) for c in (opened, ours)]
    np.testing.assert_array_equal(*logits)
