"""Every publisher's schema through the real readers; manifests; what happens without a network."""

import json
import urllib.error
from dataclasses import replace

import datasets
import pytest
import torch
from published import FILES, PNG, write

from nemo_grpo.data import SOURCES, Request, check_copies, preparation, prepare, verify
from nemo_grpo.data.local_folders import LocalFolder
from nemo_grpo.support.errors import UserError


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No network and no cache of other tests; whoever tries anyway fails at once."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def refuse(*arguments, **options):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)


def problems(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(name, tmp_path, any_count=True, **options):
    write(name, tmp_path / "copies")
    return prepare(
        name, Request(tmp_path / "out", source=tmp_path / "copies", any_count=any_count, **options)
    )


FIRST = {
    "open-rs": ("1+1?", "2", {"solution": "two", "level": "Easy"}),
    "open-s1": ("1+1?", "2", {"solution": "two"}),
    "gsm8k": ("6 of 206?", "1200", {"solution": "He has 200 * 6 = 1200."}),
    "math-lighteval": (
        "What is 1+1?", "2", {"level": "Level 5", "type": "Algebra", "solution": "So \\boxed{2}."}
    ),
    "dsr-uniform": ("1+1?", "2", {"difficulty": 9}),
    "dapo-math-17k": ("1+1?", "2", {}),
    "aime24": ("p", "204", {"solution": "s", "url": "u"}),
    "aime25": ("p", "70", {}),
    "amc23": ("p", "27", {}),
    "amc22-23": ("p", "142", {}),
    "math500": ("p", "5", {"solution": "s", "subject": "Algebra", "level": 2}),
    "minerva": ("p", "9.6", {"solution": "so $\\boxed{9.6}$ nm"}),
    "olympiadbench": ("p", "$2$", {}),
    "nq": ("who wrote it", "Ada", {"answers": ["Ada", "Ada L."]}),
    "geoqa": ("Angle?", "145°", {"images": ["geoqa.images/000000-0.png"]}),
    "sat": (
        "Answer in natural language. Moved? Choose between the following options: right, left or up", "left",
        {"question_type": "obj_movement", "images": ["sat.images/000000-0.png"]},
    ),
    "cv-bench": (
        "How many?\n(A) 1\n(B) 2\n(C) 3", "(C)",
        {
            "type": "2D", "task": "Count", "question": "How many?", "choices": ["1", "2", "3"],
            "images": ["cv-bench.images/000000-0.png"],
        },
    ),
}  # fmt: skip


BEFORE = {"open-rs": (0, 2), "dapo-math-17k": (1, 2), "sat": (1, 2)}
"""Rows before a filter: an empty question, a repeated one, one with two images."""


@pytest.mark.parametrize("name", FIRST)
def test_a_published_row_becomes_a_problem(name, tmp_path):
    done = run(name, tmp_path)
    question, answer, metadata = FIRST[name]
    assert problems(done.path)[0] == {
        "id": f"{name}-0", "question": question, "answer": answer, "metadata": metadata
    }  # fmt: skip
    assert done.manifest["num_problems"] == len(problems(done.path)) == 1 + (name == "math-lighteval")
    for image in metadata.get("images", []):
        assert (tmp_path / "out" / image).read_bytes() == PNG
    number, rows = BEFORE.get(name, (0, done.manifest["num_problems"]))
    assert name == "nq" or done.manifest["filters"][number]["before"] == rows
    assert verify(tmp_path / "out") == {name: None}


def test_every_layout_has_a_fixture():
    layouts = {name: repr(source.mapping) for name, source in SOURCES.items()}
    tested = {layouts[name] for name in (*FILES, "orz-57k")}
    local = {name for name, source in SOURCES.items() if isinstance(source.origin, LocalFolder)}
    assert {name for name, layout in layouts.items() if layout not in tested} <= local


def test_puzzles_of_all_sizes_come_in_order_from_their_own_files(tmp_path):
    done = run("kk-3to7", tmp_path)
    assert [problem["metadata"]["num_people"] for problem in problems(done.path)] == [3, 4, 5, 6, 7]
    assert problems(done.path)[0]["answer"] == "(1) A is a knight\n(2) B is a knight\n(3) C is a knight"
    assert done.manifest["revision"] == SOURCES["kk-3to7"].origin.revision
    folder = tmp_path / "copies/kk-3to7"
    (folder / "data/kk/instruct/4ppl/train.parquet").rename(folder / "train.parquet")
    with pytest.raises(UserError, match=r"has no data/kk/instruct/4ppl/train\.parquet"):
        prepare("kk-3to7", Request(tmp_path / "other", source=tmp_path / "copies"))


def test_puzzles_can_be_generated_without_overlap(tmp_path, monkeypatch):
    full = SOURCES["kk-3to7"]
    assert full.made_here.num_problems == full.expected.count == 4500
    monkeypatch.setitem(SOURCES, "kk-3to7", replace(full, made_here=replace(full.made_here, num_problems=50)))
    names = ("kk-3to7", "kk-3to7-test")
    train, test = (prepare(name, Request(tmp_path / "out", generate=True, any_count=True)) for name in names)
    sizes = [problem["metadata"]["num_people"] for problem in problems(train.path)]
    assert sizes == [size for size in (3, 4, 5, 6, 7) for _ in range(10)]
    assert len({problem["question"] for problem in problems(train.path)}) == 50
    statements = [
        {repr(problem["metadata"]["statements"]) for problem in problems(done.path)} for done in (train, test)
    ]
    assert not statements[0] & statements[1]
    assert train.manifest["source"] == "generated (logic, seed 0)"
    assert not prepare("kk-3to7", Request(tmp_path / "out", generate=True, any_count=True)).fresh
    assert verify(tmp_path / "out") == dict.fromkeys(names)
    with pytest.raises(UserError, match=r"open-rs cannot be generated; --generate is for kk-3to7, kk-3to7"):
        prepare("open-rs", Request(tmp_path / "out", generate=True))
    with pytest.raises(UserError, match="cannot be made"):
        prepare("kk-3to7-test", Request(train.path, generate=True))


def test_other_data_sets_are_not_read_instead_of_a_missing_one(tmp_path):
    copies = tmp_path / "copies"
    write("aime24", copies)
    with pytest.raises(UserError, match=r"holds copies by name \(aime24\) and none of aime25; put one into"):
        prepare("aime25", Request(tmp_path / "out", source=copies))
    assert not (tmp_path / "out").exists()
    made = prepare("kk-3to7-test", Request(tmp_path / "out", source=copies, generate=True))
    assert made.manifest["local_copy"] is None


def test_one_copy_serves_the_sets_of_its_repository_only(tmp_path):
    copy = tmp_path / "copy"
    check_copies(["nq", "nq-train", "popqa"], Request(tmp_path / "out", source=copy))
    with pytest.raises(UserError, match="would be the copy of aime24 and amc23, which are in different"):
        check_copies(["aime24", "amc23"], Request(tmp_path / "out", source=copy))
    (copy / "amc23").mkdir(parents=True)
    (copy / "aime24").mkdir()
    check_copies(["aime24", "amc23"], Request(tmp_path / "out", source=copy))


def test_a_json_list_of_dialogues_is_read(tmp_path):
    pairs = [[{"from": "human", "value": "1+1?"}, {"from": "assistant", "ground_truth": {"value": "2"}}]]
    (tmp_path / "orz_math_57k_collected.json").write_text(json.dumps(pairs))
    done = prepare("orz-57k", Request(tmp_path / "out", source=tmp_path, any_count=True))
    assert problems(done.path) == [{"id": "orz-57k-0", "question": "1+1?", "answer": "2", "metadata": {}}]


def test_grounding_boxes_enclose_all_target_polygons(tmp_path):
    notes = {
        "text": ["the thing to sit on", "another wording"],
        "shapes": [
            {"label": "target", "points": [[10.4, 20.0], [30.6, 25.0]]},
            {"label": "target", "points": [[5.0, 22.0], [6.0, 40.0]]},
            {"label": "ignore", "points": [[0.0, 0.0], [99.0, 99.0]]},
        ],
    }
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1.json").write_text(json.dumps(notes))
    (tmp_path / "train/1.jpg").write_bytes(b"\xff\xd8\xff")
    done = prepare("lisa-train", Request(tmp_path / "out", source=tmp_path, any_count=True))
    (problem,) = problems(done.path)
    assert problem["answer"] == "(5,20),(31,40)"
    assert problem["metadata"]["target"] == [shape["points"] for shape in notes["shapes"][:2]]
    assert problem["metadata"]["ignore"] == [[[0.0, 0.0], [99.0, 99.0]]]
    assert problem["question"] == "the thing to sit on"
    assert (tmp_path / "out/lisa-train.images/000000-0.jpg").is_file()


def test_geoqas_test_set_is_the_releases_list_with_its_images(tmp_path):
    row = {"image_path": "./Geo170K/images/test/0.png", "question": "Angle?", "ground_truth": "140°"}
    (tmp_path / "geoqa_test_prompts.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"geoqa-test: .* cannot be read .*images.zip, unpacked"):
        prepare("geoqa-test", Request(tmp_path / "out", source=tmp_path))
    (tmp_path / "Geo170K/images/test").mkdir(parents=True)
    (tmp_path / "Geo170K/images/test/0.png").write_bytes(PNG)
    done = prepare("geoqa-test", Request(tmp_path / "out", source=tmp_path, any_count=True))
    (problem,) = problems(done.path)
    assert (problem["question"], problem["answer"]) == ("Angle?", "140°")
    assert problem["metadata"] == {"images": ["geoqa-test.images/000000-0.png"]}


def test_classes_of_a_test_set_come_from_the_releases_labels(tmp_path):
    def entry(path, label):
        return {f"/elsewhere/{path}": {"label": torch.tensor(label), "pred_class": torch.tensor([label])}}

    torch.save([entry("b.jpg", 1), entry("a.jpg", 0)], tmp_path / "pets.pth")
    (tmp_path / "pets.txt").write_text("abyssinian\namerican_bulldog")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.jpg").write_bytes(b"\xff\xd8\xffA")
    with pytest.raises(UserError, match=r"b\.jpg is missing"):
        prepare("pets37-test", Request(tmp_path / "out", source=tmp_path))
    (tmp_path / "images/b.jpg").write_bytes(b"\xff\xd8\xffB")
    done = prepare("pets37-test", Request(tmp_path / "out", source=tmp_path, any_count=True))
    first, second = problems(done.path)
    assert (first["answer"], second["answer"]) == ("american_bulldog", "abyssinian")
    assert (tmp_path / "out" / first["metadata"]["images"][0]).read_bytes().endswith(b"B")
    assert first["question"].startswith(
        "This is an image containing a pet. Please identify the species of the pet"
    )


class Code:
    def __reduce__(self):
        return (print, ("the file's code ran",))


def test_a_list_of_labels_that_holds_code_is_refused(tmp_path, capsys):
    torch.save([Code()], tmp_path / "pets.pth")
    (tmp_path / "pets.txt").write_text("abyssinian\n")
    with pytest.raises(UserError, match=r"pets37-test: .* cannot be read"):
        prepare("pets37-test", Request(tmp_path / "out", source=tmp_path))
    assert "code ran" not in capsys.readouterr().out


def test_rules_are_applied_in_order_and_counted(tmp_path):
    done = run("math-l35", tmp_path)
    # Levels 5, 2, 3, 4 of train and 4 of test; the solution of level 3 has 205 words, that of test 204.
    assert [(f["before"], f["after"]) for f in done.manifest["filters"]] == [(5, 5), (5, 4), (4, 3)]
    asked = ["What is 1+1?", "What is 4+1?", "What is 5+1?"]
    assert [problem["question"] for problem in problems(done.path)] == asked
    assert [problem["id"] for problem in problems(done.path)] == ["math-l35-0", "math-l35-3", "math-l35-4"]
    assert all(rule["cited"] for rule in done.manifest["filters"])


def test_rows_beyond_the_first_ones_are_not_read(tmp_path, monkeypatch):
    source = SOURCES["aime25"]
    monkeypatch.setitem(SOURCES, "aime25", replace(source, origin=replace(source.origin, num_rows=2)))
    monkeypatch.setitem(FILES, "aime25", {"test.jsonl": [{"problem": "p", "answer": "70"}] * 3})
    assert run("aime25", tmp_path).manifest["num_problems"] == 2


def test_other_counts_than_stated_are_refused_unless_accepted(tmp_path):
    refused = r"aime24 has 1 problems, and 30 are stated \(CW-GRPO Table 4\).* take what is .* --any-count"
    with pytest.raises(UserError, match=refused):
        run("aime24", tmp_path, any_count=False)
    assert not list((tmp_path / "out").iterdir())
    assert run("aime24", tmp_path).fresh
    with pytest.raises(UserError, match=refused):
        run("aime24", tmp_path, any_count=False)
    expected = SOURCES["math-l35"].expected  # which the paper rounds
    assert [expected.matches(count) for count in (8356, 8388, 8525, 4931)] == [False, True, True, False]


def test_a_file_that_is_up_to_date_is_left_alone(tmp_path):
    first = run("aime25", tmp_path)
    assert first.fresh
    stamp = first.path.stat().st_mtime_ns
    again = run("aime25", tmp_path)
    assert not again.fresh
    assert again.manifest == first.manifest
    assert first.path.stat().st_mtime_ns == stamp
    assert run("aime25", tmp_path, force=True).fresh
    assert run("aime25", tmp_path, revision="v2").manifest["revision"] == "v2"


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text("{}\n")])
def test_a_file_that_does_not_match_its_manifest_is_made_again(tmp_path, harm):
    first = run("aime25", tmp_path)
    content = first.path.read_bytes()
    harm(first.path)
    assert verify(tmp_path / "out")["aime25"] is not None
    assert run("aime25", tmp_path).fresh
    assert first.path.read_bytes() == content


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch):
    first = run("geoqa", tmp_path)

    def full(*arguments):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_image", full)
        with pytest.raises(OSError, match="No space"):
            run("geoqa", tmp_path, force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "geoqa.images", "geoqa.jsonl", "geoqa.manifest.json"
    ]  # fmt: skip
    assert not run("geoqa", tmp_path).fresh
    assert first.path.is_file()
    (tmp_path / "out/geoqa.images/000000-0.png").unlink()
    assert "is missing" in verify(tmp_path / "out")["geoqa"]


def test_what_is_no_picture_is_refused(tmp_path, monkeypatch):
    row = {"image": {"bytes": b"<html>", "path": None}, "problem": "p", "solution": "s"}
    monkeypatch.setitem(FILES, "geoqa", {"data/train-00000-of-00001.parquet": [row]})
    with pytest.raises(UserError, match="neither PNG"):
        run("geoqa", tmp_path)


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("open-rs", "abc", "`hf download --repo-type dataset knoveleng/open-rs --revision abc --local-dir"),
        ("nq", None, "--include 'README.md' --include 'nq/test.jsonl' --local-dir DIR`"),
        ("amc22-23", None, "AR-Lopti/cbeb333376decdfe571fa8613bdebcfcc526628d/data/amc/amc.parquet`"),
        ("lisa-test", None, "test/*.jpg and test/*.json, to DIR"),
    ],
)
def test_without_a_network_the_error_says_what_to_download_where(tmp_path, name, revision, words):
    with pytest.raises(UserError, match="cannot be read from here") as error:
        prepare(name, Request(tmp_path / "out", revision=revision))
    assert words in str(error.value)
    assert "--source DIR" in str(error.value)
    assert "NEMO_GRPO_DATA_SOURCE" in str(error.value)
    assert not list(tmp_path.glob("out/*"))


def test_another_schema_is_a_user_error_that_names_the_columns(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"text": "1+1?", "label": "2"}\n')
    with pytest.raises(UserError, match=r"aime25: row 0 .*KeyError: 'problem'.*text, label.*--revision"):
        prepare("aime25", Request(tmp_path / "out", source=tmp_path))
    assert not list((tmp_path / "out").glob("*"))
