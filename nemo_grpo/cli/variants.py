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
    """``nemo-grpo variants NAME`` is short for ``nemo-grpo variants show NAME``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


app = typer.Typer(name="variants", cls=_NameOrCommand, invoke_without_command=True)


@app.callback()
def variants(ctx: typer.Context) -> None:
    """List the algorithms: paper, what each needs, parameters with defaults (the recipe's loss_fn keys).

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
def show(name: Annotated[str, Argument(help="Variant, or FILE:CLASS.")]) -> None:
    """Show a variant: its equations, where it departs from its paper and why, and all parameters.

    Example: nemo-grpo variants tr_grpo
    """
    import sys
    from inspect import getdoc

    from rich.console import Console

    from nemo_grpo.variants import variant_class

    variant, console = variant_class(name, "variants"), Console()
    if text := getdoc(sys.modules[variant.__module__]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(parameters(name, variant))


@app.command()
def check(
    name: Annotated[str, Argument(help="Variant, or FILE:CLASS.")],
    settings: Annotated[list[str] | None, Argument(help="Its loss_fn keys, as punishment=0.3.")] = None,
) -> None:
    """Check a loss on small made-up steps: splits, order, padding, masks, gradient, finite values.

    These are the package's own tests of its variants. `train`, `compare`, `sweep`, `rehearse` and
    `recipe check` run their quick part on a user's own loss.

    Example: nemo-grpo variants check my_loss.py:Mine punishment=0.3

    Exit codes: 0 all hold; 1 some do not; 2 there is no such variant or parameter.
    """
    from nemo_grpo.recipe.loader import parse_override
    from nemo_grpo.variants import parse_loss_fn, variant_class
    from nemo_grpo.variants.base import SAFE_DECLARATIONS
    from nemo_grpo.variants.checking import CHECKS, FIRST, check_variant
    from nemo_grpo.variants.checking.declarations import GAINS, undeclared

    given = dict(parse_override(text) for text in settings or [])
    if "max_response_length" in variant_class(name, "variants check").model_fields:
        given = {"max_response_length": 8} | given  # usually set by a recipe; aggregation=constant needs it
    config = parse_loss_fn({"variant": name, **given})
    failed = dict(check_variant(config))
    was_ended = False  # by one of the first checks, without which the others say nothing
    for each in CHECKS:
        if was_ended:
            typer.echo(f"not run {each}")
        elif each in failed:
            typer.echo(f"{typer.style('failed', fg='red')}  {each}: {failed[each]}")
            was_ended = each in FIRST
        else:
            typer.echo(f"{typer.style('ok    ', fg='green')}  {each}")
    if failed:
        raise typer.Exit(1)
    for name, safe in SAFE_DECLARATIONS.items():
        if getattr(config, name) != safe:
            typer.echo(f"has     {name} = {not safe}: {GAINS[name]}")
    for name, value in undeclared(config).items():
        typer.echo(
            f"could   declare {name} = {value} in its class, if that holds for any step: {GAINS[name]}"
        )


def overview(configs: dict[str, type[VariantConfig]]) -> Table:
    """List the variants with the parameters that differ from GRPO's."""
    from rich.table import Table

    common = _defaults(configs["grpo"])
    table = Table("variant", box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("paper", max_width=17, overflow="fold")
    table.add_column("needs")
    table.add_column("differs from grpo in", overflow="fold")
    for name, config in configs.items():
        own = [f"{key}={as_yaml(v)}" for key, v in _defaults(config).items() if common.get(key, ...) != v]
        table.add_row(f"[bold]{name}[/bold]", config.paper, _needs(config), "\n".join(own) or "-")
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
    built = config.model_construct()  # not validated: some need a value that only a recipe has
    needs = ["entropy"] * built.needs_entropy + ["reference"] * built.needs_reference
    if not built.needs_reference and "reference_policy_kl_penalty" in config.model_fields:
        needs.append("(reference)")
    return "\n".join(needs) or "-"


def _defaults(config: type[VariantConfig]) -> dict[str, object]:
    if config.learns_from_demonstrations:  # its inherited keys are for rollouts, and refused
        return {}
    return {key: field.default for key, field in config.model_fields.items() if key != "variant"}
