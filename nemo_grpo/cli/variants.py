"""``nemo-grpo variants``: the algorithms, what they need, and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from typer import Argument

from nemo_grpo.support.errors import as_yaml

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.variants.base import VariantConfig


class _NameOrCommand(typer.core.TyperGroup):
    """Makes ``nemo-grpo variants NAME`` short for ``nemo-grpo variants show NAME``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


app = typer.Typer(name="variants", cls=_NameOrCommand, invoke_without_command=True)


@app.callback()
def variants(ctx: typer.Context) -> None:
    """List the algorithms with their papers, their needs, and the parameters that differ from GRPO's.

    A parameter is a key of the recipe's section loss_fn.

    Examples:
      nemo-grpo variants
      nemo-grpo variants tr_grpo
      nemo-grpo variants check my_loss.py:Mine
    """
    if ctx.invoked_subcommand is not None:
        return
    from rich.console import Console

    from nemo_grpo.variants import OBJECTIVES

    console = Console()
    console.print(overview(OBJECTIVES))
    console.print("(reference): with reference_policy_kl_penalty > 0. In a recipe: loss_fn.variant.")
    console.print("All parameters of one: [bold]nemo-grpo variants NAME[/bold]")


@app.command()
def show(name: Annotated[str, Argument(help="Variant, or FILE:CLASS for a loss of your own.")]) -> None:
    """Show a variant: its equations, where it departs from its paper and why, and all parameters.

    Example: nemo-grpo variants tr_grpo
    """
    import sys
    from inspect import getdoc

    from rich.console import Console

    from nemo_grpo.variants import variant_class

    variant = variant_class(name, "variants")
    console = Console()
    # The docstring of the variant's module contains the equations.
    equations = getdoc(sys.modules[variant.__module__])
    if equations:
        console.print(equations, markup=False, highlight=False, soft_wrap=True)
    console.print(parameters(name, variant))


@app.command()
def check(
    name: Annotated[str, Argument(help="Variant, or FILE:CLASS for a loss of your own.")],
    settings: Annotated[
        list[str] | None, Argument(help="Parameters of the loss, such as punishment=0.3.")
    ] = None,
) -> None:
    """Check a loss on small invented steps: splits, order, padding, masks, gradient, finite values.

    These checks are the tests of the package's own variants. `train`, `compare`, `sweep`, `rehearse` and
    `recipe check` run the quick ones on a loss of your own.

    Example: nemo-grpo variants check my_loss.py:Mine punishment=0.3

    Exit codes: 0 all hold; 1 some do not; 2 there is no such variant or parameter.
    """
    from nemo_grpo.recipe.loader import parse_override
    from nemo_grpo.variants import parse_loss_fn, variant_class
    from nemo_grpo.variants.base import SAFE_DECLARATIONS
    from nemo_grpo.variants.checking import CHECKS, FIRST, check_variant
    from nemo_grpo.variants.checking.declarations import GAINS, undeclared

    loss_keys = dict(parse_override(setting) for setting in settings or [])
    if "max_response_length" in variant_class(name, "variants check").model_fields:
        # aggregation=constant needs this key, which recipes usually set.
        loss_keys = {"max_response_length": 8} | loss_keys
    config = parse_loss_fn({"variant": name, **loss_keys})
    failures = dict(check_variant(config))
    has_ended = False
    for check_name in CHECKS:
        if has_ended:
            typer.echo(f"not run {check_name}")
        elif check_name in failures:
            typer.echo(f"{typer.style('failed', fg='red')}  {check_name}: {failures[check_name]}")
            # The later checks mean nothing if one of the first ones fails.
            has_ended = check_name in FIRST
        else:
            typer.echo(f"{typer.style('ok    ', fg='green')}  {check_name}")
    if failures:
        raise typer.Exit(1)
    for declaration, safe_value in SAFE_DECLARATIONS.items():
        if getattr(config, declaration) != safe_value:
            typer.echo(f"has     {declaration} = {not safe_value}: {GAINS[declaration]}")
    for declaration, value in undeclared(config).items():
        condition = "in its class, if that holds for any step"
        typer.echo(f"could   declare {declaration} = {value} {condition}: {GAINS[declaration]}")


def overview(configs: dict[str, type[VariantConfig]]) -> Table:
    """List the variants with the parameters that differ from GRPO's."""
    from rich.table import Table

    common = _defaults(configs["grpo"])
    table = Table("variant", box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("paper", max_width=17, overflow="fold")
    table.add_column("needs")
    table.add_column("differs from grpo in", overflow="fold")
    for name, config in configs.items():
        different = []
        for key, default in _defaults(config).items():
            # Two tests, because GRPO may lack the key, or may have it with the default None.
            if key not in common or common[key] != default:
                different.append(f"{key}={as_yaml(default)}")
        table.add_row(f"[bold]{name}[/bold]", config.paper, _needs(config), "\n".join(different) or "-")
    return table


def parameters(name: str, config: type[VariantConfig]) -> Table:
    """List the parameters of one variant."""
    from rich.table import Table

    table = Table(title=f"{config.title}: {config.paper}")
    table.add_column("loss_fn key", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("meaning")
    table.caption = "needs: " + _needs(config).replace("\n", ", ")
    for key, value in _defaults(config).items():
        table.add_row(key, as_yaml(value), config.model_fields[key].description or "")
    return table


def _needs(config: type[VariantConfig]) -> str:
    # Constructed without validation, because some variants require a value that only a recipe has.
    defaults = config.model_construct()
    needs = []
    if defaults.needs_entropy:
        needs.append("entropy")
    if defaults.needs_reference:
        needs.append("reference")
    elif "reference_policy_kl_penalty" in config.model_fields:
        needs.append("(reference)")
    return "\n".join(needs) or "-"


def _defaults(config: type[VariantConfig]) -> dict[str, object]:
    # Supervised training inherits the keys for rollouts, but refuses values for them.
    if config.learns_from_demonstrations:
        return {}
    return {key: field.default for key, field in config.model_fields.items() if key != "variant"}
