"""Names and signatures of a NeMo-RL tree against the table; without NeMo-RL.

The tree is made of the table: a stub for each name with the signature that the table expects.
"""

import pytest
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.nemorl.doctor import check_tree, fits
from nemo_grpo.nemorl.host_api import HOST_API
from nemo_grpo.support.errors import UserError


def stub(name, signature, indent=""):
    words = signature[1:-1].split(", ") if signature != "()" else []
    words = [word.replace("=", "=None") for word in words if word != "..."]
    if words[-1:] == ["*"]:
        words.append("_more=None")
    if indent:
        words.insert(0, "self")
    return f"{indent}def {name}({', '.join(words)}): ...\n"


@pytest.fixture
def tree(tmp_path):
    """A NeMo-RL with every name of the table."""
    functions, methods = {}, {}
    for name in HOST_API:
        module, _, path = name.name.partition(":")
        holder, _, last = path.rpartition(".")
        methods.setdefault(module, {})
        if holder:
            methods[module].setdefault(holder, {})[last] = name.signature or "(...)"
        else:
            functions.setdefault(module, {})[last] = name.signature or "(...)"
    for module, classes in methods.items():
        text = "".join(
            f"class {holder}:\n" + "".join(stub(last, sign, "    ") for last, sign in members.items())
            for holder, members in classes.items()
        )
        text += "".join(
            stub(last, sign) for last, sign in functions.get(module, {}).items() if last not in classes
        )
        folder = tmp_path / module.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)
    for folder in (tmp_path / "nemo_rl").rglob("*/"):
        (folder / "__init__.py").touch()
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    return tmp_path


def change(tree, module, before, after):
    path = tree / module.replace(".", "/") / "__init__.py"
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_tree_with_all_signatures_fits(tree):
    assert check_tree(tree) == []
    result = run("--nemo-rl", str(tree))
    assert (result.exit_code, result.output) == (
        0,
        f"doctor: NeMo-RL fits; 0 of {len(HOST_API)} names differ\n",
    )


@pytest.mark.parametrize(
    ("module", "before", "after", "message"),
    [
        (
            "nemo_rl.algorithms.grpo",
            "timer, batch_cache=None)",
            "timer)",
            "nemo_rl.algorithms.grpo:dynamic_sampling has the signature (repeated_batch, std, baseline, "
            "dynamic_sampling_num_gen_batches, master_config, timer), expected: (repeated_batch, std, "
            "baseline, dynamic_sampling_num_gen_batches, master_config, timer, batch_cache=) [every run]",
        ),
        (
            "nemo_rl.utils.config",
            "def load_config(",
            "def read_config(",
            "nemo_rl.utils.config:load_config is gone [every run]",
        ),
        (
            "nemo_rl.models.megatron.train",
            "logits, sampling_params)",
            "sampling_params, logits)",
            "nemo_rl.models.megatron.train:apply_temperature_scaling has the signature (sampling_params, "
            "logits), expected: (logits, sampling_params) [pipeline stages at a temperature other than 1]",
        ),
    ],
    ids=["parameter removed", "function renamed", "parameters swapped"],
)  # fmt: skip
def test_a_change_is_reported_with_name_and_both_signatures(tree, module, before, after, message):
    change(tree, module, before, after)
    result = run("--nemo-rl", str(tree))
    assert result.exit_code == 1
    first, last = result.output.splitlines()
    assert first == message
    assert last.startswith(
        "doctor: NeMo-RL does not fit; tested: the release 0.7.0 or the commit 7ea279abf; 1 of"
    )


def test_names_of_the_single_controller_alone_leave_the_verdict(tree):
    change(tree, "nemo_rl.experience.payload", "record_to_train_batch", "record_to_rows")
    result = run("--nemo-rl", str(tree))
    assert result.exit_code == 0
    assert "record_to_train_batch is gone [recipes with async_rl]" in result.output
    assert "doctor: NeMo-RL fits, except for recipes with async_rl; 1 of" in result.output


def test_imported_and_inherited_names_are_found(tree):
    logger = tree / "nemo_rl" / "utils" / "logger" / "__init__.py"
    (logger.parent / "base.py").write_text(logger.read_text().replace("class Logger", "class Base"))
    logger.write_text(
        "from nemo_rl.utils.logger.base import Base, get_next_experiment_dir\nclass Logger(Base): ...\n"
    )
    assert check_tree(tree) == []


def test_an_optional_name_may_be_missing_but_not_differ(tree):
    change(tree, "nemo_rl.algorithms.grpo", "shutdown_environments(task_to_env, ", "shutdown_environments(")
    assert [misfit.signature for misfit in check_tree(tree)] == ["(val_task_to_env)"]
    change(tree, "nemo_rl.algorithms.grpo", "shutdown_environments", "shut_down")
    assert check_tree(tree) == []


def test_fields_of_a_class_without_constructor_are_its_signature(tree):
    fields = ["observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers"]
    interfaces = "nemo_rl.environments.interfaces"
    stub_of_it = stub("EnvironmentReturn", f"({', '.join(fields)})").strip()
    as_class = "class EnvironmentReturn:\n" + "".join(f"    {name}: int\n" for name in fields)
    change(tree, interfaces, stub_of_it, as_class)
    assert check_tree(tree) == []
    change(tree, interfaces, "    rewards: int\n", "")
    (misfit,) = check_tree(tree)
    assert misfit.signature == "(observations, metadata, next_stop_strings, terminateds, answers)"


@pytest.mark.parametrize(
    ("expected", "found", "does_fit"),
    [
        ("(a, b=)", "(a, b=)", True),
        ("(a, b=)", "(a, b=, c=)", False),  # ours takes no c
        ("(a, b=)", "(a, b)", False),
        ("()", "()", True),
        ("(...)", "()", True),
        ("(...)", "(a)", False),  # which we would not pass
        ("(a, ...)", "(a, b=, *, c=, **more)", True),
        ("(a, ...)", "(a, b)", False),
        ("(a, b=, ...)", "(b, a)", False),
        ("(a, *, c=, ...)", "(a, b=, c=)", True),  # by name, at any place
        ("(a, *, c=, ...)", "(a, b=)", False),
        ("(a, *, c=, ...)", "(a, *, c)", True),
        ("(a, b=, ...)", "(a, *, b=)", False),
    ],
)
def test_a_signature_fits_if_our_calls_do(expected, found, does_fit):
    assert fits(expected, found) is does_fit


def test_a_folder_without_nemo_rl_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the folder of NeMo-RL's clone"):
        check_tree(tmp_path)


def test_no_folder_at_all_is_refused(monkeypatch):
    monkeypatch.delenv("NEMO_RL_SRC", raising=False)
    assert "NEMO_RL_SRC is not set" in str(run().exception)
