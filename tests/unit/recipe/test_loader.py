"""Files, defaults, overrides, interpolation."""

import pytest
from omegaconf import OmegaConf

from nemo_grpo.recipe.interpolation import register_resolvers, resolve
from nemo_grpo.recipe.loader import OVERRIDE, Written, apply_overrides, load_tree, merge, parse_override
from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_defaults_are_relative_merge_in_order_and_the_file_itself_wins(tmp_path):
    (tmp_path / "base").mkdir()
    write(
        tmp_path / "base",
        root="s: {a: 1, b: 1, c: 1, d: 1}",
        first="defaults: root.yaml\ns: {b: 2, c: 2, d: 2}",
        again="defaults: root.yaml\ns: {c: 3, d: 3}",
    )
    write(tmp_path, recipe="defaults: [base/first.yaml, base/again.yaml]\ns: {d: 4}")
    assert load_tree(tmp_path / "recipe.yaml") == {"s": {"a": 1, "b": 1, "c": 3, "d": 4}}


def test_defaults_in_a_circle_name_the_circle(tmp_path):
    write(tmp_path, a="defaults: b.yaml", b="defaults: a.yaml")
    with pytest.raises(UserError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_tree(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML.*line 1"),
        ("a: 1\na: 2", "duplicate key a"),
        ("- 1", "holds a list"),
        ("defaults: nowhere.yaml", "there is no file .*nowhere.yaml"),
        ("defaults: 3", "must be a file name"),
        ("sweep: {recipe: a.yaml}", r"recipe\.yaml is a sweep, not a recipe"),
    ],
)
def test_unreadable_files_say_what_is_wrong(tmp_path, text, message):
    write(tmp_path, recipe=text)
    with pytest.raises(UserError, match=message) as raised:
        load_tree(tmp_path / "recipe.yaml")
    assert "recipe.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_and_folder_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_tree(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_tree(tmp_path)


def test_override_marker_replaces_a_section_instead_of_merging():
    base = {"s": {"a": 1, "deep": {"x": 1}}, "other": 1}
    over = {"s": {"_override_": True, "b": 2}}
    merge(base, {"s": {"b": 2}})["s"]["a"] = 9
    assert merge(base, over) == {"s": {"b": 2}, "other": 1}
    assert merge(base, {"s": {"deep": {"_override_": True, "y": 2}}})["s"] == {"a": 1, "deep": {"y": 2}}
    assert merge(base, {"s": {"_override_": False, "b": 2}})["s"] == {"a": 1, "deep": {"x": 1}, "b": 2}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("grpo.seed=1", 1),
        ("++grpo.seed=1", 1),
        ("grpo.seed=1e-6", 1e-6),
        ("grpo.seed='1'", "1"),
        ("grpo.seed=[1, a]", [1, "a"]),
        ("grpo.seed={a: 1}", {"a": 1}),
        ("grpo.seed=a=b", "a=b"),
        ("grpo.seed=${grpo.other}", "${grpo.other}"),
    ],
)
def test_override_values_have_yaml_types(override, value):
    parsed = parse_override(override)
    assert parsed == ("grpo.seed", value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize("override", ["grpo.seed", "=1", "grpo..seed=1", "grpo.seed=[1"])
def test_malformed_overrides_are_refused(override):
    with pytest.raises(UserError, match="override"):
        parse_override(override)


def test_overrides_apply_in_order_before_interpolation():
    tree = {"grpo": {"seed": 1, "max_num_steps": "${mul:${grpo.seed}, 10}"}}
    changed = apply_overrides(tree, ["grpo.seed=2", "grpo.seed=3"])
    assert resolve(changed).tree == {"grpo": {"seed": 3, "max_num_steps": 30}}
    assert tree["grpo"]["seed"] == 1


def test_override_makes_a_section_only_for_a_known_key():
    known = apply_overrides({}, ["policy.megatron_cfg.fp8_cfg.enabled=true"])
    assert known == {"policy": {"megatron_cfg": {"fp8_cfg": {"enabled": True}}}}
    assert apply_overrides({}, ["policy.megatron_cfg.env_vars.ANY=1"]) != {}
    with pytest.raises(UserError, match=r"policy\.megatron_cgf is not a key.*'megatron_cfg'"):
        apply_overrides({"policy": {}}, ["policy.megatron_cgf.enabled=true"])
    with pytest.raises(UserError, match=r"grpo\.seed is 1, not a section"):
        apply_overrides({"grpo": {"seed": 1}}, ["grpo.seed.x=1"])


def test_tilde_removes_a_key():
    assert apply_overrides({"grpo": {"seed": 1, "x": 2}}, ["~grpo.x"]) == {"grpo": {"seed": 1}}
    assert apply_overrides({"grpo": {"seed": 1}}, ["~grpo"]) == {}


def test_tilde_refuses_a_missing_key():
    for missing in ("~grpo.sed", "~grpo.seed.x", "~x.y"):
        with pytest.raises(UserError, match="to remove"):
            apply_overrides({"grpo": {"seed": 1}}, [missing])


def test_a_reward_function_is_overridden_by_the_key_that_a_refused_resume_prints():
    tree = {"nemo_grpo": {"rewards": {"accuracy": 1.0, "rewards.py:length_penalty": 0.1}}}
    key = "nemo_grpo.rewards.rewards.py:length_penalty"
    assert [name for name, _ in leaves(tree)] == ["nemo_grpo.rewards.accuracy", key]
    changed = apply_overrides(tree, [f"{key}=0.5"])
    assert changed["nemo_grpo"]["rewards"] == {"accuracy": 1.0, "rewards.py:length_penalty": 0.5}
    assert apply_overrides(tree, [f"~{key}"])["nemo_grpo"]["rewards"] == {"accuracy": 1.0}
    added = apply_overrides(tree, ["++nemo_grpo.rewards.../shared/r.py:brevity=1"])
    assert added["nemo_grpo"]["rewards"]["../shared/r.py:brevity"] == 1
    new = apply_overrides({}, ["nemo_grpo.rewards.accuracy=2"])
    assert new == {"nemo_grpo": {"rewards": {"accuracy": 2}}}
    assert Written(tree, {}).with_overrides([f"{key}=0.5"]).origins[key] == OVERRIDE


TREE = {
    "chain": "${section.c}",
    "section": {
        "c": "${mul:2, ${..three}}",
        "e": None,
        "relative": "${.c}",
        "below": "${.f.g}",
        "f": "${other}",
    },
    "three": 3,
    "other": {"g": [1, 2.0, True], "x": 5},
    "call": "${max:${add:${three}, 1, 2}, ${div:${three}, 4}}",
    "text": "${three}/${section.c}/x",
    "name": "${other.${x}}",
    "x": "x",
    "escaped": "\\${three}",
    "list": ["${three}", {"c": "${other.g.0}"}],
    "key.with.dots": "${three}",
}


@pytest.mark.parametrize("tree", [TREE, *map(load_tree, shipped.recipe_names())])
def test_resolved_values_are_omegaconfs(tree):
    register_resolvers()
    expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    assert repr(resolve(tree).tree) == repr(expected), "1, 1.0 and True differ, and keys keep their order"


def test_resolvers_compute_as_nemo_rl_does():
    found = resolve(TREE).tree
    assert (found["call"], found["section"]["c"], resolve({"a": "${div:6, 4}"}).tree["a"]) == (6, 6, 1.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${x.y}", r"s\.a: .*'x\.y' not found"),
        ("${s.a}", r"s\.a: .*Recursive"),
        ("${nothing:1}", r"s\.a: .*nothing"),
        ("${mul:2, x}", r"s\.a: .*mul takes numbers"),
        ("???", r"s\.a=\?\?\?: .*add s\.a="),
    ],
)
def test_failed_interpolation_names_the_key(value, message):
    with pytest.raises(UserError, match=message) as raised:
        resolve({"s": {"a": value}})
    assert "\n" not in str(raised.value)


def test_a_resolved_recipe_shares_nothing_with_the_next():
    tree = {"a": "${b}", "b": {"c": [1]}}
    resolve(tree).tree["a"]["c"].append(2)
    assert resolve(tree).tree == {"a": {"c": [1]}, "b": {"c": [1]}}
