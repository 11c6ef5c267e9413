"""``nemo-grpo variants``: the algorithms, what they need, and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nemo_grpo.errors import as_yaml

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.variants.base import VariantConfig


def variants(
    name: Annotated[
        str | None, typer.Argument(help="One variant, with all of its parameters.", show_default=False)
    ] = None,
) -> None:
    """List the algorithms: paper, what each needs, parameters with defaults (the recipe's loss_fn keys).

    Example: nemo-grpo variants tr_grpo
    """
    from rich.console import Console

    from nemo_grpo.variants import OBJECTIVES, variant_class

    console = Console()
    if name is None:
        console.print(overview(OBJECTIVES))
        console.print("(reference): with reference_policy_kl_penalty > 0. In a recipe: loss_fn.variant.")
        console.print("All parameters of one: [bold]nemo-grpo variants NAME[/bold]")
    else:
        console.print(parameters(name, variant_class(name, "variants")))


def overview(configs: dict[str, type[VariantConfig]]) -> Table:
    """One row per variant, with the parameters that differ from GRPO's."""
    from rich.table import Table

    common = _defaults(configs["grpo"])
    table = Table("variant", show_lines=True)
    table.add_column("paper", max_width=15, overflow="fold")
    table.add_column("needs")
    table.add_column("differs from grpo in", overflow="fold")
    for name, config in configs.items():
        own = [
            f"{key}={as_yaml(value)}"
            for key, value in _defaults(config).items()
            if common.get(key, ...) != value
        ]
        table.add_row(f"[bold]{name}[/bold]", config.paper, _needs(config), "\n".join(own) or "-")
    return table


def parameters(name: str, config: type[VariantConfig]) -> Table:
    """One row per parameter of one variant."""
    from rich.table import Table

    table = Table(title=f"{config.title}: {config.paper}")
    for column, wraps in (("loss_fn key", False), ("default", True), ("meaning", True)):
        table.add_column(column, no_wrap=not wraps, overflow="fold")
    table.caption = "needs: " + _needs(config).replace("\n", ", ")
    for key, value in _defaults(config).items():
        table.add_row(key, as_yaml(value), config.model_fields[key].description or "")
    return table


def _needs(config: type[VariantConfig]) -> str:
    built = config.model_construct()  # not validated: some need a value that only a recipe has
    needs = [
        word
        for word, needed in (("entropy", built.needs_entropy), ("reference", built.needs_reference))
        if needed
    ]
    if not built.needs_reference and "reference_policy_kl_penalty" in config.model_fields:
        needs.append("(reference)")
    return "\n".join(needs) or "-"


def _defaults(config: type[VariantConfig]) -> dict[str, object]:
    if config.learns_from_demonstrations:  # what it inherits is about rollouts, and refused
        return {}
    return {key: field.default for key, field in config.model_fields.items() if key != "variant"}
