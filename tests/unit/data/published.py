"""A few invented rows in each publisher's schema, as files that the ``datasets`` library reads."""

import base64
import json

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = {"bytes": PNG, "path": None}
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put "
    'your answer on its own line after "Answer:".'
)
STEPS = "{} Let's think step by step and output the final answer within \\boxed{{}}."


def chat(text, truth, **extra_info):
    prompt, reward_model = [{"content": text, "role": "user"}], {"ground_truth": truth, "style": "rule"}
    extra_info = {"index": 0, "split": "train", **extra_info}
    return {"data_source": "s", "prompt": prompt, "reward_model": reward_model, "extra_info": extra_info}


def math_rows(*rows):
    keys = ("problem", "level", "type", "solution")
    values = ((f"What is {n}+1?", level, "Algebra", solution) for n, level, solution in rows)
    return [dict(zip(keys, value, strict=True)) for value in values]


def puzzle(*names):
    return {
        "quiz": f"Who is what among {', '.join(names)}?",
        "names": list(names),
        "solution": [True] * len(names),
        "solution_text_format": "\n".join(f"({i}) {name} is a knight" for i, name in enumerate(names, 1)),
        "statements": "()",
    }


MATH = math_rows((1, "Level 5", "So \\boxed{2}."), (2, "Level 2", "\\boxed{\\frac{6}{2}}"))

TRAIN = "data/train-00000-of-00001.parquet"
FILES = {
    "open-rs": {
        TRAIN: [
            {"problem": "1+1?", "solution": "two", "answer": "2", "level": "Easy"},
            {"problem": "No answer?", "solution": "", "answer": "", "level": "Hard"},
        ]
    },
    "open-s1": {TRAIN: [{"problem": "1+1?", "solution": "two", "answer": "2"}]},
    "gsm8k": {
        "main/train-00000-of-00001.parquet": [
            {"question": "6 of 206?", "answer": "He has 200 * 6 = <<200*6=1200>>1200.\n#### 1,200"}
        ]
    },
    "math-lighteval": {TRAIN: MATH},
    "math-l35": {
        TRAIN: [
            *MATH,
            *math_rows((3, "Level 3", "x " * 204 + "\\boxed{4}"), (4, "Level 4", "\\boxed{5}")),
        ],
        "data/test-00000-of-00001.parquet": math_rows((5, "Level 4", "x\n" * 203 + "\\boxed{6}")),
    },
    "dsr-uniform": {
        "data/deepscaler_c/deepscaler_uniform_train.parquet": [chat(STEPS.format("1+1?"), "2", difficulty=9)]
    },
    "dapo-math-17k": {"data/dapo-math-17k.parquet": [chat(DAPO.format("1+1?"), "2")] * 2},
    "aime24": {TRAIN: [{"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u"}]},
    "aime25": {"test.jsonl": [{"problem": "p", "answer": "70", "id": "0"}]},
    "amc23": {TRAIN: [{"problem": "p", "answer": 27.0}]},
    "amc22-23": {"data/amc/amc.parquet": [chat("p", 142.0)]},
    "math500": {
        "test.jsonl": [{"problem": "p", "solution": "s", "answer": "5", "subject": "Algebra", "level": 2}]
    },
    "minerva": {TRAIN: [{"problem": "p", "solution": "so $\\boxed{9.6}$ nm"}]},
    "olympiadbench": {TRAIN: [{"question": "p", "answer": "$2$", "id": 1}]},
    "kk-3to7": {
        f"data/kk/instruct/{n}ppl/train.parquet": [puzzle(*"ABCDEFG"[:n])] for n in (3, 4, 5, 6, 7)
    },
    "nq": {
        "nq/test.jsonl": [
            {"id": "test_0", "question": "who wrote it", "golden_answers": ["Ada", "Ada L."], "metadata": {}},
            {"id": "test_1", "question": "who did not", "golden_answers": [], "metadata": {}},
        ]
    },
    "geoqa": {TRAIN: [{"image": PICTURE, "problem": "Angle?", "solution": "<answer> 145° </answer>"}]},
    "sat": {
        "SAT_train.parquet": [
            {"image_bytes": pictures, "question": "Moved?", "answers": ["left", "right", "up"],
             "question_type": "obj_movement", "correct_answer": "left"}
            for pictures in ([PICTURE], [PICTURE, PICTURE])
        ]
    },
    "cv-bench": {
        "test_2d.parquet": [
            {"idx": 0, "type": "2D", "task": "Count", "image": PICTURE, "answer": "(C)",
             "question": "How many?", "choices": ["1", "2", "3"], "prompt": "How many?\n(A) 1\n(B) 2\n(C) 3"}
        ]
    },
}  # fmt: skip


def write(name, folder):
    """The repository of data set ``name`` below ``folder``."""
    from datasets import Dataset, Image, Sequence

    for path, rows in FILES[name].items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".jsonl":
            target.write_text("".join(json.dumps(row) + "\n" for row in rows))
            continue
        dataset = Dataset.from_list(rows)
        if "image" in rows[0]:
            dataset = dataset.cast_column("image", Image(decode=False))
        if "image_bytes" in rows[0]:
            dataset = dataset.cast_column("image_bytes", Sequence(Image(decode=False)))
        dataset.to_parquet(str(target))
    return folder / name
