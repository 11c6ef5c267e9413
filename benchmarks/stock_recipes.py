"""NeMo-RL's own GRPO configurations that are accepted, unchanged and with one more line: a variant.

    python -m benchmarks.stock_recipes RL [RL ...]

Reads every YAML file below ``examples`` of NeMo-RL's repository that has a section ``grpo`` and a policy, and
checks it as `nemo-grpo recipe check` does. Prints how many are accepted, every reason for which others are
refused, and the keys that are unknown. Nothing of NeMo-RL is imported.
"""

import argparse
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.interpolation import resolve
from nemo_grpo.recipe.keys import unknown_key_errors
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.recipe.validation import RecipeErrors, load_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import VARIANTS

PLACES = {name: "/somewhere" for name in ("HF_HOME", "PERSISTENT_CACHE", "NRL_MEGATRON_CHECKPOINT_DIR")}
"""Environment variables that NeMo-RL's recipes read."""


def main() -> None:
    """Print a table for each repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repositories", nargs="+", type=Path, metavar="RL", help="NeMo-RL's repository")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated; default: all")
    arguments = parser.parse_args()
    for name, value in PLACES.items():
        os.environ.setdefault(name, value)
    for repository in arguments.repositories:
        report(repository, arguments.variants.split(","))


def report(repository: Path, variants: list[str]) -> None:
    """Print the tables of a repository's configurations."""
    files = list(configurations(repository))
    unknown = Counter(key for file in files for key in unknown_keys(file))
    print(f"\n## {repository.name}: {len(files)} configurations\n")
    print("unknown keys:", ", ".join(f"{key} ({count})" for key, count in unknown.items()) or "none")
    print("\n| loss_fn.variant | accepted | refused |\n|---|---|---|")
    reasons: dict[str, set[str]] = defaultdict(set)
    for variant in ("", *variants):
        num_refused = 0
        for file in files:
            errors = errors_of(file, variant)
            if errors:
                num_refused += 1
            for error in errors:
                reasons[rule_of(error)].add(file.stem)
        print(f"| {variant or 'none: as it is'} | {len(files) - num_refused} | {num_refused} |")
    print("\n| reason | configurations |\n|---|---|")
    for reason, stems in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"| {reason} | {len(stems)}, such as {min(stems)} |")


def configurations(repository: Path) -> Iterator[Path]:
    """Yield files with a section ``grpo`` and a policy, possibly from their bases."""
    for file in sorted((repository / "examples").rglob("*.yaml")):
        try:
            tree = load_tree(file)
        except UserError:
            # It is another kind of YAML file, or its base is not in the repository.
            continue
        if isinstance(tree.get("grpo"), dict) and "policy" in tree:
            yield file


def unknown_keys(file: Path) -> list[str]:
    """List keys of a configuration that this package does not know."""
    return [error.split("=")[0] for error in unknown_key_errors(resolve(load_tree(file)).tree)]


def errors_of(file: Path, variant: str) -> list[str]:
    """List errors of `recipe check` for a configuration; ``variant`` "" leaves its loss."""
    try:
        load_recipe(file, [f"++loss_fn.variant={variant}"] if variant else [])
    except RecipeErrors as error:
        return error.errors
    except UserError as error:
        return [str(error)]
    return []


def rule_of(error: str) -> str:
    """Cut the remedy and the values from an error, so that equal rules give equal texts."""
    rule = error.partition("; ")[0]
    rule = re.sub(r"\d+", "N", rule)
    rule = re.sub(r"=[^ ,;:]+", "=..", rule)
    # A vertical bar would end a cell of the Markdown table.
    return rule[:150].replace("|", "/")


if __name__ == "__main__":
    main()
