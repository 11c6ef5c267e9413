"""Transformer Engine's layers and FP8 recipes in the engine; torch computes their kernels (`te_on_cpu`)."""

import json
import os
from typing import Any

import pytest
import torch
from processes import ROOT, output_of, python
from te_on_cpu import FOLDER
from toy_policies import FULL_RECOMPUTE, SELECTIVE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs on it"),
    pytest.mark.skipif(
        not (FOLDER / "transformer_engine").is_dir(), reason=f"no {FOLDER}; `make venv` puts it there"
    ),
]

TP2_SP, PP2, CP2 = {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"context": 2}
RECIPES = ("tensorwise", "delayed", "blockwise")


def fp8(recipe: str, form: str = "hybrid", **more: Any) -> dict[str, Any]:
    return {"fp8": form, "fp8_recipe": recipe, **more}


def local(**arguments: Any) -> tuple[int, str, dict[str, Any]]:
    return (1, "updates", {"impl": "local", **arguments})


def te(ranks: int = 1, **arguments: Any) -> tuple[int, str, dict[str, Any]]:
    return (ranks, "updates", arguments)


FAMILIES = ("qwen2", "qwen3", "llama")
LIKE_LOCAL = {
    **{family: (te(family=family), local(family=family)) for family in FAMILIES},
    "lora": (te(lora=True), local(lora=True)),
    "lora-packed-recompute": (te(lora=True, mb_tokens=100, **FULL_RECOMPUTE), local(lora=True)),
    "lora-tp2-sp": (te(2, lora=True, layout=TP2_SP), local(lora=True)),
}
LIKE_ONE = {
    "packed": te(mb_tokens=100),
    "full recompute": te(**FULL_RECOMPUTE),
    "selective recompute": te(**SELECTIVE),
    "tp2-sp": te(2, layout=TP2_SP),
    "tp2-packed": te(2, layout={"tensor": 2}, mb_tokens=100),
    "pp2": te(2, layout=PP2),
    "dp2": te(2),
    "cp2": te(2, layout=CP2),
    "cp2-packed": te(2, layout=CP2, mb_tokens=100),
    "tp2-cp2-sp-packed": te(4, layout=TP2_SP | CP2, mb_tokens=100),
    "tp2-cp2-sp": te(4, layout=TP2_SP | CP2),
}
IN_FP8 = {
    **{f"{recipe} {form}": te(**fp8(recipe, form)) for recipe in RECIPES for form in ("hybrid", "e4m3")},
    "blockwise packed, ends in BF16": te(mb_tokens=100, **fp8("blockwise", first_last_layers_bf16=True)),
    "delayed recompute": te(**fp8("delayed"), **FULL_RECOMPUTE),
    "tensorwise lora": te(lora=True, **fp8("tensorwise")),
    **{f"{recipe} tp2-sp": te(2, layout=TP2_SP, **fp8(recipe)) for recipe in RECIPES},
    "delayed pp2": te(2, layout=PP2, **fp8("delayed")),
    "tensorwise cp2": te(2, layout=CP2, **fp8("tensorwise")),
    "delayed cp2-packed": te(2, layout=CP2, mb_tokens=100, **fp8("delayed")),
    "blockwise tp2-cp2-sp": te(4, layout=TP2_SP | CP2, **fp8("blockwise", "e4m3")),
}
RESUMED = {
    "te": ({}, {}),
    "delayed": (fp8("delayed"), {}),
    "te by local": ({}, {"impl": "local"}),
    "local by te": ({"impl": "local"}, {"impl": "transformer_engine"}),
}
CONVERTED = {
    **{family: (1, {"family": family}) for family in FAMILIES},
    "tp2-sp, delayed": (2, {"layout": TP2_SP, **fp8("delayed")}),
    "pp2": (2, {"layout": PP2}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """What every case answered, by its arguments as JSON, or by its name in `RESUMED`."""
    folder = tmp_path_factory.mktemp("te")
    cases: dict[str, Any] = {key(case): case for pair in LIKE_LOCAL.values() for case in pair}
    cases |= {key(case): case for group in (LIKE_ONE, IN_FP8) for case in group.values()}
    for name, (arguments, loaded_by) in RESUMED.items():
        how = {"folder": str(folder / name), "loaded_by": loaded_by, **arguments}
        cases[name] = (1, "resumed", how)
    for name, (ranks, arguments) in CONVERTED.items():
        cases[f"converted {name}"] = (ranks, "converted", {"folder": str(folder / name), **arguments})
    cases["gpu_tests"] = (1, "gpu_tests", {"folder": str(folder / "gpu_tests")})
    path = os.pathsep.join(map(str, (ROOT, *(ROOT / "tests" / part for part in ("", "integration", "gpu")))))
    run = ("-W", "ignore", "-c", "import sys, te_cases; te_cases.main(*sys.argv[1:])")
    output_of(python(*run, folder / "answers", json.dumps(list(cases.values())), PYTHONPATH=path))
    return dict(zip(cases, torch.load(folder / "answers"), strict=True))


def key(case: tuple[int, str, dict[str, Any]]) -> str:
    return json.dumps(case)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """As BF16 allows: the orders of sums differ."""
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=0, atol=0.012)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-3)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=5e-3)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=2e-3, msg=name)


@pytest.mark.parametrize("name", LIKE_LOCAL)
def test_the_layers_compute_what_the_local_ones_do(run, name):
    found, expected = LIKE_LOCAL[name]
    assert_close(run[key(found)], run[key(expected)])


@pytest.mark.parametrize("name", LIKE_ONE)
def test_every_layout_computes_the_same(run, name):
    assert_close(run[key(LIKE_ONE[name])], run[key(LIKE_LOCAL["qwen2"][0])])


@pytest.mark.parametrize("name", IN_FP8)
def test_fp8_is_close_to_bf16(run, name):
    found = run[key(IN_FP8[name])]
    bf16 = run[key(LIKE_LOCAL["lora" if "lora" in name else "qwen2"][0])]
    drift = (found["scores"] - bf16["scores"]).abs()
    assert 1e-3 < drift.mean() < 0.02  # FP8 did run
    assert found["losses"][0] == pytest.approx(bf16["losses"][0], abs=0.01)
    if name != "delayed e4m3":
        assert found["losses"] == pytest.approx(bf16["losses"], abs=0.01)
        assert found["grad_norms"] == pytest.approx(bf16["grad_norms"], rel=0.05)


def test_delayed_scaling_loses_the_first_gradients_in_e4m3(run):
    """Its first scale is 1, and most of a gradient is below what e4m3 holds: `options.fp8_hint` says so."""
    found, bf16 = run[key(IN_FP8["delayed e4m3"])], run[key(LIKE_LOCAL["qwen2"][0])]
    assert found["grad_norms"][0] < 0.7 * bf16["grad_norms"][0]


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_goes_on_as_if_unbroken(run, name):
    found = run[name]
    unbroken, resumed = found["unbroken"], found["resumed"]
    assert resumed["losses"] == pytest.approx(unbroken["losses"][-1:], abs=1e-3)
    if RESUMED[name][1]:
        torch.testing.assert_close(resumed["scores"], unbroken["scores"], rtol=0, atol=0.03)
    else:
        assert torch.equal(resumed["scores"], unbroken["scores"])
        assert resumed["grad_norms"] == unbroken["grad_norms"][-1:]
        for weight, tensor in unbroken["weights"].items():
            assert torch.equal(resumed["weights"][weight], tensor), weight


@pytest.mark.parametrize("name", CONVERTED)
def test_converters_and_layers_read_each_others_checkpoints(run, name):
    found = run[f"converted {name}"]
    for there, here in (("model", "read"), ("weights", "back")):
        assert found[here].keys() == found[there].keys()
        for weight, tensor in found[here].items():
            assert torch.equal(tensor, found[there][weight]), weight


def test_the_tests_for_a_gpu_pass_with_the_same_numbers(run):
    """Those of tests/gpu that need Transformer Engine; only a GPU's kernels are missing."""
    found = run["gpu_tests"]
    assert len(found["ran"]) == 10
    assert not found["failed"], "\n".join(found["failed"].values())
