"""What `resolved_values` leaves out of OmegaConf's sight changes nothing."""

import pytest
from omegaconf.errors import OmegaConfBaseException

from nemo_grpo.recipe.interpolation import by_omegaconf, resolved_values
from nemo_grpo.recipe.loader import load_tree, register_resolvers
from nemo_grpo.support import shipped

TREES = {
    "chain": {"a": "${b.c}", "b": {"c": "${mul:2, ${..d}}", "e": None}, "d": 3},
    "relative": {"a": {"b": "${.c}", "c": "${..d.e}"}, "d": {"e": [1, 2.0, True]}},
    "section": {"a": "${b}", "b": {"c": 1, "d": "${e}"}, "e": "x"},
    "below a reference": {"a": "${b.c}", "b": "${d}", "d": {"c": {"f": 1}}},
    "nested call": {"a": "${max:${b}, ${mul:2, ${c}}}", "b": 7, "c": 4},
    "text around": {"a": "${b}/${c}/x", "b": "r", "c": 1},
    "nested name": {"a": "${b.${c}}", "b": {"x": 1, "y": 2}, "c": "y"},
    "name that a removal would make": {"a": "$${b}{c}", "b": "", "c": 5},
    "escaped": {"a": "\\${b}", "b": 1},
    "in a list": {"a": ["${b}", {"c": "${b}"}], "b": 1},
    "item of a list": {"a": "${b.0}", "b": [4, 5]},
    "key with a dot": {"a.b": "${c}", "c": 1},
    "key that is a number": {1: "${c}", "c": 1},
    "kinds alike": {"a": "${b}", "b": 1, "c": "${d}", "d": True, "e": "${f}", "f": 1.0},
    "missing key": {"a": "${b.c}", "b": {"d": 1}},
    "key below null": {"a": "${b.c}", "b": None},
    "circle": {"a": "${b}", "b": "${a}"},
    "call that fails": {"a": "${mul:2, ${b}}", "b": "x"},
    "left to the user": {"a": "???", "b": 1},
    "reference to what is left": {"a": "${b}", "b": "???"},
}


def outcome(resolve, tree):
    try:
        return repr(resolve(tree))  # tells 1 from 1.0 and True, and keeps the order
    except (OmegaConfBaseException, RecursionError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_resolved_values_are_omegaconfs(tree):
    register_resolvers()
    assert outcome(resolved_values, tree) == outcome(by_omegaconf, tree)


@pytest.mark.parametrize("name", shipped.recipe_names())
def test_resolved_recipes_are_omegaconfs(name):
    register_resolvers()
    tree = load_tree(name)
    assert outcome(resolved_values, tree) == outcome(by_omegaconf, tree)


def test_a_resolved_recipe_shares_nothing_with_the_next():
    register_resolvers()
    tree = {"a": "${b}", "b": {"c": [1]}}
    resolved_values(tree)["a"]["c"].append(2)
    assert resolved_values(tree) == {"a": {"c": [1]}, "b": {"c": [1]}}
