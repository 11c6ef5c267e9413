"""How the cluster driver ends. NeMo-RL is not needed: it is what the driver finds after it has returned."""

import json
import os
import signal
import sys
import weakref
from types import SimpleNamespace as Of
from unittest.mock import Mock

import pytest
from transformers import Qwen2Config

from nemo_grpo.nemorl import compat, run_grpo, trainer
from nemo_grpo.nemorl.callbacks import Callback
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.exit_status import Ending, exit_code, last_step
from nemo_grpo.nemorl.pretrained import load_tokenizer, model_config
from nemo_grpo.nemorl.trainer import Training
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.signals import StopRequest
from nemo_grpo.support.errors import UserError

GRPO = Of(max_num_steps=100, use_dynamic_sampling=False, is_async=False)


def run_of(task="math", saves=True):
    own, saving = Of(task=task), Of(enabled=saves)
    return Of(recipe=Of(grpo=GRPO, nemo_grpo=own, checkpointing=saving, has_single_controller=False))


RUN = run_of()


def ended(total, current, is_async=False):
    """What NeMo-RL leaves: the steps that its newest checkpoint knows of."""
    grpo = {"async_grpo": {"enabled": is_async}}
    return Of(grpo_save_state={"total_steps": total, "current_step": current}, master_config={"grpo": grpo})


def stop(happened=False, reached_threshold=False, last_step=0):
    end = Ending(StopRequest(), GRPO)
    end.happened, end.reached_threshold, end.last_step = happened, reached_threshold, last_step
    return end


@pytest.mark.parametrize(
    ("parts", "how", "code"),
    [
        (ended(100, 40), stop(), 0),
        (ended(40, 40), stop(True), 75),
        (ended(100, 40), stop(True), 0),  # told to stop in its last step
        (ended(80, 40), stop(), 1),  # such as at the end of its epochs
        (ended(0, 100, is_async=True), stop(), 0),  # asynchronous training leaves total_steps alone
        (ended(0, 40, is_async=True), stop(True), 75),
        (ended(20, 100, is_async=True), stop(), 0),  # after 20 synchronous steps
        (ended(0, 40, is_async=True), stop(), 1),  # its trainer prints an error and returns
        (ended(0, 40, is_async=True), stop(reached_threshold=True), 0),
        (ended(0, 40), stop(reached_threshold=True), 0),
        (ended(0, 40, is_async=True), stop(last_step=99), 1),
        (ended(0, 40, is_async=True), stop(last_step=100), 0),
    ],
)
def test_exit_code_is_0_only_for_a_finished_run(parts, how, code):
    assert exit_code(RUN, parts, 100, how) == code


def test_without_checkpoints_the_logged_steps_tell():
    run, nothing_saved = run_of(saves=False), ended(0, 0, is_async=True)
    assert exit_code(run, nothing_saved, 100, stop(last_step=100)) == 0
    assert exit_code(run, nothing_saved, 100, stop(last_step=30)) == 1
    assert exit_code(run, nothing_saved, 100, stop(True, last_step=30)) == 1  # it cannot go on


def test_data_of_nemo_rl_end_a_run_with_their_last_epoch():
    run, parts = run_of(task=None), ended(6, 6)
    parts.master_config["grpo"]["max_num_epochs"] = 3
    parts.dataloader = range(10)
    assert (last := last_step(run, parts)) == 6 + 3 * 10 - 6
    assert exit_code(run, ended(30, 0), last, stop()) == 0
    assert exit_code(run, ended(29, 9), last, stop()) == 1


def of_model(folder, *, trusted=False, stops=None, overrides=()):
    policy = Of(
        model_name=str(folder),
        tokenizer=Of(name=None),
        generation=Of(stop_token_ids=stops),
        hf_config_overrides=dict(overrides),
    )
    return Of(recipe=Of(policy=policy, nemo_grpo=Of(trust_remote_code=trusted)))


def test_the_drivers_configuration_has_the_recipes_overrides(tmp_path):
    Qwen2Config(vocab_size=300, max_position_embeddings=64).save_pretrained(tmp_path)
    config = model_config(of_model(tmp_path, overrides={"max_position_embeddings": 128}))
    assert config.max_position_embeddings == 128


def test_a_model_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"policy.model_name=\S+ has no config.json .*; give a Hugging Face"):
        model_config(of_model(tmp_path))


def test_a_stop_token_beyond_the_vocabulary_is_refused(tmp_path):
    Qwen2Config(vocab_size=300).save_pretrained(tmp_path)
    model_config(of_model(tmp_path, stops=[299]))
    with pytest.raises(UserError, match=r"stop_token_ids=\[2, 300\]: 300 is not below vocab_size=300 of /"):
        model_config(of_model(tmp_path, stops=[2, 300]))


CODE = """
import pathlib
from transformers import Qwen2Config

pathlib.Path(__file__ + ".ran").touch()

class Config(Qwen2Config):
    pass
"""


@pytest.mark.parametrize("model_type", ["qwen2", "unheard_of"])
def test_a_models_own_code_runs_only_if_the_recipe_trusts_it(tmp_path, monkeypatch, model_type):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    Qwen2Config().save_pretrained(folder)
    assert type(model_config(of_model(folder))) is Qwen2Config
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    with pytest.raises(UserError, match=r"brings Python code .* set nemo_grpo.trust_remote_code=true"):
        model_config(of_model(folder))
    (folder / "tokenizer_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    with pytest.raises(UserError, match=r"brings Python code .* set nemo_grpo.trust_remote_code=true"):
        model_config(of_model(folder))
    assert not list(tmp_path.rglob("*.ran"))
    model_config(of_model(folder, trusted=True))


@pytest.mark.parametrize(("has_images", "load_format"), [(True, "auto"), (False, "dummy")])
def test_vllm_loads_the_model_where_there_are_images(monkeypatch, has_images, load_format):
    """No refit sends all that such an engine has."""

    def configure(generation, tokenizer, **_):
        return {"vllm_cfg": {**generation["vllm_cfg"], "load_format": "dummy"}}  # as NeMo-RL's does

    theirs = {"get_tokenizer": lambda *_, **__: Of(tokenizer=None), "configure_generation_config": configure}
    monkeypatch.setattr(compat, "import_name", lambda name: theirs[name.split(":")[1]])
    policy = {"tokenizer": {}, "generation": {"vllm_cfg": {"async_engine": False}}}
    recipe = Of(env=Of(should_use_nemo_gym=False), policy=Of(generation=Of(backend="vllm")))
    load_tokenizer(Of(master_config=Of(policy=policy), recipe=recipe, has_images=has_images))
    assert policy["generation"]["vllm_cfg"] == {"async_engine": False, "load_format": load_format}


@pytest.mark.parametrize(
    ("epochs", "batches", "state", "is_refused"),
    [
        (1, 100, {}, False),
        (1, 99, {}, True),
        (2, 50, {}, False),
        (0, 100, {}, True),
        (1, 100, {"total_steps": 60, "current_step": 60}, False),
        (1, 100, {"total_steps": 60, "current_step": 10, "current_epoch": 1}, True),
        (2, 50, {"total_steps": 60, "current_step": 10, "current_epoch": 1}, False),
        (1, 100, {"total_steps": 100, "current_step": 0, "current_epoch": 1}, False),  # it is finished
    ],
)
def test_too_few_epochs_are_refused_before_the_first_step(epochs, batches, state, is_refused):
    config = {"grpo": {"max_num_epochs": epochs}}
    parts = Of(grpo_save_state=state, master_config=config, dataloader=range(batches))
    if not is_refused:
        assert last_step(RUN, parts) == 100
        return
    with pytest.raises(UserError, match=f"max_num_epochs={epochs}: .*the data ends after"):
        last_step(RUN, parts)


class Logger:
    """Stands for NeMo-RL's."""

    def log_metrics(self, metrics, step, prefix="", **_):
        pass


class Timeout:
    """Stands for NeMo-RL's `TimeoutChecker`, whose time is never up."""

    def check_save(self):
        return False


class Trainer:
    """Stands for NeMo-RL: three steps; after each it logs, and asks if it is to save and return."""

    def __init__(self, in_step_two=lambda: None):
        self.in_step_two = in_step_two
        self.has_shut_down = False
        self.parts = Parts(
            policy_generation=Of(shutdown=self.shut_down),
            logger=Logger(),
            checkpointer=Of(init_tmp_checkpoint=None),
            grpo_save_state={},
            master_config={"grpo": {}},
        )

    def shut_down(self):
        self.has_shut_down = True

    def train(self):
        for step in (1, 2, 3):
            if step == 2:
                self.in_step_two()
            self.parts.logger.log_metrics({"total_step_time": 1.0}, step, "timing/train")
            if Timeout().check_save():
                return


@pytest.fixture
def main(monkeypatch, tmp_path):
    """The driver, with a stand-in for what it imports of NeMo-RL and for what sets the trainer up."""
    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.timer"):
        monkeypatch.setitem(sys.modules, name, Of(TimeoutChecker=Timeout))
    monkeypatch.setattr(compat, "check", lambda: None)
    short = ["grpo.max_num_steps=3", "checkpointing.metric_name=null", f"nemo_grpo.runs_dir={tmp_path}"]
    recipe = load_recipe("cluster-quickstart", short)
    monkeypatch.setattr(run_grpo, "load_run", lambda *_: ClusterRun(recipe, Of(logger={"log_dir": tmp_path})))

    def start(set_up):
        monkeypatch.setattr(run_grpo, "start", lambda _run: None)
        monkeypatch.setitem(run_grpo.TRAINERS, "sync", lambda *_: set_up())
        return run_grpo.main(["--config", "x.yaml"])

    return start


def ready(nemo_rl):
    return Training(
        parts=nemo_rl.parts, train=nemo_rl.train, environments=[{}, {}], side_files=Callback(), last_step=3
    )


def be_told_to_stop():
    os.kill(os.getpid(), signal.SIGUSR1)


def lose_a_worker():
    raise RuntimeError("a worker died")


def lose_the_retriever():
    raise UserError("the retriever does not answer")  # it may be back when the job tries again


@pytest.mark.parametrize(
    ("in_step_two", "code"),
    [(lambda: None, 0), (be_told_to_stop, 75), (lose_a_worker, 1), (lose_the_retriever, 1)],
)
def test_the_exit_code_says_how_training_ended_and_the_workers_end_with_it(main, in_step_two, code):
    nemo_rl = Trainer(in_step_two)
    assert main(lambda: ready(nemo_rl)) == code
    assert nemo_rl.has_shut_down


def test_a_refusal_before_training_is_one_line_and_exit_code_2(main, capsys):
    refuse = Mock(side_effect=UserError("data/x.jsonl: No such file or directory; prepare it"))
    assert main(refuse) == 2
    assert capsys.readouterr().err == "error: data/x.jsonl: No such file or directory; prepare it\n"


@pytest.mark.parametrize("failing", ["set_up", "train"])
def test_what_a_failure_held_is_freed_before_the_driver_ends(main, monkeypatch, failing):
    """NeMo-RL's policy calls Ray when it is freed, which at the interpreter's end waits for ever."""

    references = []

    def fail():
        workers = set()
        references.append(weakref.ref(workers))
        raise RuntimeError(workers)

    monkeypatch.setattr(run_grpo.log, "exception", lambda _text: None)  # pytest keeps what is logged
    assert main(fail if failing == "set_up" else lambda: ready(Trainer(fail))) == 1
    assert references[0]() is None


def test_workers_get_the_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:/else")
    monkeypatch.setattr(trainer, "__file__", f"{tmp_path}/nemo_grpo/nemorl/trainer.py")
    trainer.share_sources()
    assert os.environ["PYTHONPATH"] == f"{tmp_path}:/else"


def test_workers_never_get_the_drivers_packages(monkeypatch):
    installed = "/venv/lib/python3.12/site-packages/nemo_grpo/nemorl/trainer.py"
    monkeypatch.setattr(trainer, "__file__", installed)
    with pytest.raises(UserError, match="PYTHONPATH"):
        trainer.share_sources()
