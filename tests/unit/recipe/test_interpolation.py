"""References in a recipe."""

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_grpo.recipe.interpolation import register_resolvers, resolve
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError

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
    except (OmegaConfBaseException, UserError, RecursionError):
        return "refused"


def by_omegaconf(tree):
    return OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("tree", [*TREES.values(), *map(load_tree, shipped.recipe_names())])
def test_resolved_values_are_omegaconfs(tree):
    register_resolvers()
    assert outcome(lambda tree: resolve(tree).tree, tree) == outcome(by_omegaconf, tree)


def test_a_resolved_recipe_shares_nothing_with_the_next():
    tree = {"a": "${b}", "b": {"c": [1]}}
    resolve(tree).tree["a"]["c"].append(2)
    assert resolve(tree).tree == {"a": {"c": [1]}, "b": {"c": [1]}}
