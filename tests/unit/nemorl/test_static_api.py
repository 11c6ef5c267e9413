"""Reading a tree's definitions and calls by its syntax."""

import pytest

from nemo_grpo.nemorl import static_api
from nemo_grpo.nemorl.static_api import Tree, misfit
from nemo_grpo.support.errors import UserError

FILES = {
    "__init__.py": "",
    "base.py": """
from abc import abstractmethod
class Base:
    def __init__(self, config, *, name="x"):
        self.workers = []
    @abstractmethod
    def step(self, batch): ...
    @abstractmethod
    def close(self): ...
""",
    "middle/__init__.py": "from ..base import Base as Renamed\nfrom .deep import helper\n",
    "middle/deep.py": "def helper(a, b=1, /, c=2, *rest, d, e=3, **more):\n    return a, [b], c\n",
    "top.py": """
from pkg.middle import Renamed, helper
try:
    import fast
except ImportError:
    def fallback(): ...
class Made(Renamed):
    LIMIT: int = 3
    def close(self): ...
    @staticmethod
    def find(path, *, component=None): ...
TABLE: dict[str, int] = {"one": 1, "two": 2}
def run(logger, policy, metrics, fn):
    helper(1, *rest)
    logger.log({}, step=1, prefix="a")
    policy.train(1, loss=2, **more)
    model.train()
    if isinstance(fn, Made):
        fn(data=1)
    else:
        fn(other=1)
    metrics["kept"] = metrics["loss"]
def outer():
    def make():
        class Inner:
            def call(self, x): ...
""",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(tmp_path, "pkg")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pkg.middle.deep:helper", ["a", "b=", "/", "c=", "*rest", "d", "e=", "**more"]),
        ("pkg.top:helper", ["a", "b=", "/", "c=", "*rest", "d", "e=", "**more"]),  # through two imports
        ("pkg.top:Made", ["config", "*", "name="]),  # its base's constructor
        ("pkg.top:Made.step", ["batch"]),  # inherited
        ("pkg.top:Made.find", ["path", "*", "component="]),
        ("pkg.top:fallback", []),
        ("pkg.top:outer.make.Inner.call", ["x"]),
    ],
)
def test_parameters_are_found_through_imports_bases_and_functions(tree, name, expected):
    assert static_api.parameters(tree.find(name)) == expected


def test_kinds_attributes_and_keys(tree):
    for name in ("pkg.top:absent", "pkg.absent:run", "pkg.top:Made.absent", "pkg.top:fast"):
        assert tree.find(name) is None
    kinds = {"Made": "class", "Made.find": "staticmethod function", "run": "function", "TABLE": "mapping"}
    assert {name: static_api.kind(tree.find(f"pkg.top:{name}")) for name in kinds} == kinds
    assert tree.find("pkg.top:Made.workers") is not None, "set in the base's constructor"
    assert tree.find("pkg.top:Made.LIMIT") is not None
    assert static_api.keys(tree.find("pkg.top:TABLE")) == ["one", "two"]
    assert static_api.abstract(tree.find("pkg.top:Made")) == ["step"]
    assert tree.returned(tree.find("pkg.middle.deep:helper")) == ["a", "_", "c"]
    assert tree.subscripts("pkg.top", "metrics") == {"loss"}


def test_calls_are_told_apart_by_receiver_and_condition(tree):
    assert tree.calls("helper", "pkg") == ["(_, *)"]
    assert tree.calls("log", "pkg") == ["(_, prefix=_, step=_)"]
    assert tree.calls("policy.train", "pkg") == ["(_, loss=_, **)"]
    assert tree.calls("fn", "pkg", guard="Made") == ["(data=_)"]
    assert tree.calls("fn", "pkg.middle") == []
    assert tree.importers("pkg.middle.deep:helper") == ["pkg.middle", "pkg.middle.deep"]


def test_code_is_the_same_with_other_comments_and_docstring(tree, tmp_path):
    def digest(text):
        (tmp_path / "pkg" / "one.py").write_text(text)
        again = Tree(tmp_path, "pkg")
        return again.code(again.find("pkg.one:f"))

    plain = digest("def f(x):\n    y = x + 1\n    return y\n")
    assert digest('def f(x):\n    """Doc."""\n\n    y = x + 1  # why\n    # more\n    return y\n') == plain
    assert digest("def f(x):\n    y = x + 2\n    return y\n") != plain


TAKEN = ["a", "b=", "/", "c=", "*rest", "d", "e=", "**more"]


@pytest.mark.parametrize(
    ("parameters", "call", "why"),
    [
        *((TAKEN, call, "") for call in ("(_, c=_, d=_)", "(_, _, _, _, _, d=_)", "(**)", "(*, d=_)")),
        (TAKEN, "(_, z=_, d=_)", ""),  # **more
        (TAKEN, "(_)", "missing a required"),
        (["a", "*", "b="], "(_, c=_)", "got an unexpected keyword argument 'c'"),
        (["a"], "(_, _)", "too many positional arguments"),
        (["a", "/"], "(a=_)", "'a' parameter is positional only"),
    ],
)
def test_a_call_fits_or_says_why(parameters, call, why):
    found = misfit(parameters, call)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_syntax_of_a_newer_python_is_refused_with_its_line(tree, tmp_path):
    (tmp_path / "pkg" / "newer.py").write_text("x = 1\nunless x:\n    pass\n")
    with pytest.raises(UserError, match=r"newer\.py, line 2, is not Python 3"):
        tree.find("pkg.newer:x")
