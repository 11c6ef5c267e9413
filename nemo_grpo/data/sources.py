"""Every training and evaluation set of the papers: location, meaning of the columns, filters.

`Source` explains the table's fields.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from nemo_grpo.data.fields import (
    FieldMapping,
    boxed,
    chat_row,
    columns,
    dialogue,
    offered_choices,
    picture,
    puzzle,
    short_answers,
    worked,
)
from nemo_grpo.data.filters import (
    Filter,
    complete,
    first,
    levels,
    one_image,
    short_solution,
    unique_questions,
)
from nemo_grpo.data.generated import Generated, generated
from nemo_grpo.data.local_folders import ClassificationTest, GeoQATest, ReasonSeg
from nemo_grpo.data.origins import GitFiles, Hub, Origin
from nemo_grpo.errors import UserError, did_you_mean

Use = Literal["training", "evaluation"]
ROUNDED = 0.05


@dataclass(frozen=True)
class Expected:
    """Expected number of problems.

    Attributes: within: the part by which a count may differ; `ROUNDED` where the text that states it rounds.
    """

    count: int
    stated: str
    within: float = 0.0

    def __str__(self) -> str:
        return f"{'about ' if self.within else ''}{self.count}"

    def matches(self, count: int) -> bool:
        return abs(count - self.count) <= self.count * self.within


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes:
        task: name of the task that scores it.
        paper: the papers that use it, with the passage.
        schema: how its columns are known. ``files``: seen in the published files; ``readers``: from public
            programs or cards that read it; ``assumed``: by analogy.
        made_here: another origin for the same kind of problems, by `generate`; its mapping is `generated`.
    """

    name: str
    use: Use
    task: str
    paper: str
    origin: Origin
    mapping: FieldMapping
    schema: Literal["files", "readers", "assumed"]
    filters: tuple[Filter, ...] = ()
    expected: Expected | None = None
    made_here: Generated | None = None

    @property
    def chain(self) -> tuple[Filter, ...]:
        """All filters in order: question and answer are there, then the set's own."""
        return (complete(), *self.filters)

    def generate(self) -> Self:
        """The same data set from `made_here`. Raises: UserError: it has no generator."""
        if self.made_here is None:
            able = ", ".join(source.name for source in TABLE if source.made_here)
            raise UserError(f"{self.name} cannot be generated; --generate is for {able}")
        return replace(self, origin=self.made_here, mapping=generated, filters=())


AR_LOPTI = "cbeb333376decdfe571fa8613bdebcfcc526628d"
"""The commit of the repository whose splits TR-GRPO uses (Section 4.1: Yang et al., 2025c)."""
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
STEPS = "Let's think step by step and output the final answer within \\boxed{}."
MATH_KEEP = ("level", "type", "solution")
PEOPLE = (3, 4, 5, 6, 7)


def _ar_lopti(*paths: str) -> GitFiles:
    return GitFiles("zhyang2226/AR-Lopti", paths, AR_LOPTI)


def _flash_rag(config: str, split: str) -> Hub:
    return Hub("RUC-NLPIR/FlashRAG_datasets", (split,), config, ("README.md", f"{config}/{split}.jsonl"))


def _questions(name: str, config: str, split: str, use: Use) -> Source:
    paper = "TR-GRPO B.1.3"
    return Source(name, use, "search_qa", paper, _flash_rag(config, split), short_answers, "readers")


def _few_shot(name: str, repository: str) -> Source:
    mapping = picture("problem", "solution", tags=True)
    paper = "GPG 3.1"
    origin = Hub(f"laolao77/{repository}")
    return Source(name, "training", "vision_classification", paper, origin, mapping, "readers")


def _classes(name: str, split: str, count: int) -> Source:
    origin, mapping = ClassificationTest(split), picture("question", "label")
    paper, expected = "GPG Table 6", Expected(count, "the published file")
    task = "vision_classification"
    return Source(name, "evaluation", task, paper, origin, mapping, "files", expected=expected)


def _reason_seg(split: str, use: Use, paper: str, expected: Expected) -> Source:
    origin, mapping = ReasonSeg(split), picture("query", "box", keep=("target", "ignore"))
    task = "vision_grounding"
    return Source(f"lisa-{split}", use, task, paper, origin, mapping, "readers", expected=expected)


def _gsm8k(name: str, split: str, use: Use, count: int) -> Source:
    origin = Hub("openai/gsm8k", (split,), "main", ("README.md", "main/*"))
    expected = Expected(count, "the set's card")
    return Source(
        name, use, "math", "2110.14168", origin, worked("question", "answer"), "readers", expected=expected
    )


TABLE: tuple[Source, ...] = (
    # Mathematics: training.
    Source(
        "open-rs", "training", "math", "CW-GRPO Appendix A; GPG 3.1 (GPG-RS3)",
        Hub("knoveleng/open-rs"), columns("problem", "answer", keep=("solution", "level")), "readers",
        expected=Expected(7000, "CW-GRPO Appendix A"),
    ),
    Source(
        "open-s1", "training", "math", "GPG 3.1 (GPG-RS1)",
        Hub("knoveleng/open-s1"), columns("problem", "answer", keep=("solution",)), "readers",
        expected=Expected(18615, "CW-GRPO Table 2, samples of Open-RS1"),
    ),
    Source(
        "math-lighteval", "training", "math", "GPG 2 and B.2",
        Hub("DigitalLearningGmbH/MATH-lighteval", config="default", files=("README.md", "data/*")),
        columns("problem", "solution", keep=MATH_KEEP, read=boxed), "readers",
    ),
    Source(
        "math-l35", "training", "math", "ERPO 5.1 and A.3",
        Hub(
            "DigitalLearningGmbH/MATH-lighteval", ("train", "test"), "default", ("README.md", "data/*")
        ),
        columns("problem", "solution", keep=MATH_KEEP, read=boxed), "readers",
        filters=(
            levels(("Level 3", "Level 4", "Level 5"), "ERPO 5.1"),
            # Words leave 8388; tokens of Qwen2.5 would leave 4931.
            short_solution(204, "ERPO A.3: 10 % of the maximum output length, 2048"),
        ),
        expected=Expected(8441, "ERPO A.3", within=0.01),
    ),
    Source(
        "dsr-uniform", "training", "math", "TR-GRPO B.1.2",
        _ar_lopti("data/deepscaler_c/deepscaler_uniform_train.parquet"),
        chat_row(suffix=STEPS, keep=("difficulty",)), "files",
        expected=Expected(10000, "TR-GRPO B.1.2"),
    ),
    Source(
        "orz-57k", "training", "math", "TR-GRPO B.1.2",
        GitFiles(
            "Open-Reasoner-Zero/Open-Reasoner-Zero", ("data/orz_math_57k_collected.json",), layout="list"
        ),
        dialogue, "readers",
        expected=Expected(57000, "TR-GRPO B.1.2", ROUNDED),
    ),
    Source(
        "dapo-math-17k", "training", "math", "GPG B.1",
        Hub("BytedTsinghua-SIA/DAPO-Math-17k"), chat_row(prefix=DAPO_PREFIX, suffix=DAPO_SUFFIX), "readers",
        filters=(unique_questions("the repository repeats every problem"),),
        expected=Expected(17000, "the set's name", ROUNDED),
    ),
    _gsm8k("gsm8k", "train", "training", 7473),
    # Mathematics: evaluation.
    _gsm8k("gsm8k-test", "test", "evaluation", 1319),
    Source(
        "aime24", "evaluation", "math", "CW-GRPO Table 4",
        Hub("HuggingFaceH4/aime_2024"), columns("problem", "answer", keep=("solution", "url")), "readers",
        expected=Expected(30, "CW-GRPO Table 4"),
    ),
    Source(
        "aime25", "evaluation", "math", "ERPO 5.1",
        Hub("math-ai/aime25", ("test",)), columns("problem", "answer"), "readers",
        expected=Expected(30, "two examinations of 15"),
    ),
    Source(
        "amc23", "evaluation", "math", "CW-GRPO Table 4",
        Hub("knoveleng/AMC-23"), columns("problem", "answer"), "readers",
        expected=Expected(40, "CW-GRPO Table 4"),
    ),
    Source(
        "amc22-23", "evaluation", "math", "TR-GRPO 4.1",
        _ar_lopti("data/amc/amc.parquet"), chat_row(), "files",
        expected=Expected(83, "the published file"),
    ),
    Source(
        "math500", "evaluation", "math", "CW-GRPO Table 4",
        Hub("HuggingFaceH4/MATH-500", ("test",)),
        columns("problem", "answer", keep=("solution", "subject", "level")), "readers",
        expected=Expected(500, "CW-GRPO Table 4"),
    ),
    Source(
        "minerva", "evaluation", "math", "CW-GRPO Table 4",
        Hub("knoveleng/Minerva-Math"),
        columns("problem", "solution", keep=("solution",), read=boxed), "readers",
        expected=Expected(272, "CW-GRPO Table 4"),
    ),
    Source(
        "minerva-40", "evaluation", "math", "ERPO A.3",
        Hub("knoveleng/Minerva-Math"),
        columns("problem", "solution", keep=("solution",), read=boxed), "readers",
        filters=(first(40, "ERPO A.3"),),
        expected=Expected(40, "ERPO A.3"),
    ),
    Source(
        "olympiadbench", "evaluation", "math", "CW-GRPO Table 4",
        Hub("knoveleng/OlympiadBench"), columns("question", "answer"), "readers",
        expected=Expected(675, "CW-GRPO Table 4"),
    ),
    # Logic.
    Source(
        "kk-3to7", "training", "logic", "TR-GRPO 4.1",
        _ar_lopti(*(f"data/kk/instruct/{n}ppl/train.parquet" for n in PEOPLE)), puzzle, "files",
        expected=Expected(4500, "900 puzzles of each size in the published files"),
        made_here=Generated(4500, held_out=False, people=PEOPLE),
    ),
    Source(
        "kk-3to7-test", "evaluation", "logic", "TR-GRPO Table 1",
        _ar_lopti(*(f"data/kk/instruct/{n}ppl/test.parquet" for n in PEOPLE)), puzzle, "files",
        expected=Expected(500, "100 puzzles of each size in the published files"),
        made_here=Generated(500, held_out=True, people=PEOPLE),
    ),
    # Questions for search.
    _questions("nq-train", "nq", "train", "training"),
    _questions("hotpotqa-train", "hotpotqa", "train", "training"),
    _questions("nq", "nq", "test", "evaluation"),
    _questions("triviaqa", "triviaqa", "test", "evaluation"),
    _questions("popqa", "popqa", "test", "evaluation"),
    _questions("hotpotqa", "hotpotqa", "dev", "evaluation"),
    _questions("2wiki", "2wikimultihopqa", "dev", "evaluation"),
    _questions("musique", "musique", "dev", "evaluation"),
    _questions("bamboogle", "bamboogle", "test", "evaluation"),
    # Vision.
    Source(
        "geoqa", "training", "vision_math", "GPG 3.1",
        Hub("leonardPKU/GEOQA_R1V_Train_8K"), picture("problem", "solution", tags=True), "readers",
        expected=Expected(8000, "GPG 3.1", ROUNDED),
    ),
    Source(
        "sat", "training", "vision_classification", "GPG 3.1",
        # rows, wording and single images: the release's VisualThinker-R1-Zero/src/data/SAT/process_dataset.py
        Hub("array/SAT", num_rows=15000), offered_choices, "readers",
        filters=(one_image("process_dataset.py"),),
        expected=Expected(12000, "GPG 3.1", ROUNDED),
    ),
    Source(
        "cv-bench", "evaluation", "vision_classification", "GPG Table 7",
        Hub("nyu-visionx/CV-Bench", ("test",)),
        picture("prompt", "answer", keep=("type", "task", "question", "choices")), "readers",
    ),
    _reason_seg("train", "training", "GPG 3.1 and Table 8", Expected(239, "GPG 3.1")),
    _reason_seg("val", "evaluation", "GPG Table 8", Expected(200, "LISA (2308.00692), section 3.2")),
    _reason_seg("test", "evaluation", "GPG Table 8", Expected(779, "LISA (2308.00692), section 3.2")),
    Source(
        "geoqa-test", "evaluation", "vision_math", "GPG Table 5",
        GeoQATest(), picture("question", "ground_truth"), "files",
        expected=Expected(754, "the published file"),
    ),
    _few_shot("flower102", "ViRFT_CLS_flower_4_shot"),
    _few_shot("pets37", "ViRFT_CLS_pets37_4shot"),
    _few_shot("fgvc-aircraft", "ViRFT_CLS_fgvc_aircraft_4_shot"),
    _few_shot("car196", "ViRFT_CLS_car196_4shot"),
    _classes("flower102-test", "oxford_flowers", 2463),
    _classes("pets37-test", "pets", 3669),
    _classes("fgvc-aircraft-test", "fgvc_aircraft", 3333),
    _classes("car196-test", "stanford_cars", 8041),
)  # fmt: skip

SOURCES: dict[str, Source] = {source.name: source for source in TABLE}
ALIASES = {"rs1": "open-s1", "rs2": "open-rs", "rs3": "open-rs", "math": "math-lighteval"}
"""Open-RS1 was trained on open-s1; Open-RS2 and Open-RS3 on the same mix, with other rewards and lengths."""


def find_source(name: str) -> Source:
    """The data set of this name or alias. Raises: UserError: there is none."""
    name = ALIASES.get(name, name)
    if name not in SOURCES:
        raise UserError(f"unknown data set {name!r}{did_you_mean(name, [*SOURCES, *ALIASES])}")
    return SOURCES[name]
