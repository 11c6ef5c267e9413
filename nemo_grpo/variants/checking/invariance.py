"""Checks of an objective on a step. Each returns None, or what was expected, what was found and the remedy.

The step's current logprobs must be a leaf with gradient, in float64.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective
from nemo_grpo.variants.checking.small_steps import (
    SEED,
    changed,
    counts,
    loss_and_gradient,
    loss_of,
    split,
    token_tensors,
)

RTOL, ATOL = 1e-9, 1e-12


def adds_up(objective: Objective, batch: TokenBatch, parts: Sequence[Tensor] | None = None) -> str | None:
    """Check that losses and gradients of parts (default: single rows) add up to the whole step's."""
    if objective.whole_groups_per_loss_call:
        return None
    rows = list(torch.arange(len(batch.rewards)).split(1)) if parts is None else parts
    return _compare(
        loss_and_gradient(objective, batch),
        loss_and_gradient(objective, batch, rows),
        ("in one piece", f"as {len(rows)} microbatches"),
        "terms() must treat every row by itself: what spans rows, such as a mean over them, belongs into "
        "shape(), and the loss is divided by the step's counts already",
    )


def ignores_order(objective: Objective, batch: TokenBatch, order: Tensor) -> str | None:
    """Check that the order of rows and the numbers of groups do not matter."""
    value, gradient, prepared = loss_and_gradient(objective, batch)
    shuffled = batch.select(order, next_token_logprobs=batch.next_token_logprobs[order])
    shuffled = changed(shuffled, group_ids=100 - shuffled.group_ids)
    return _compare(
        (value, gradient[order], prepared),
        loss_and_gradient(objective, shuffled),
        ("in one order of rows", "in another"),
        "find a response's group by batch.group_ids, not by its place; draw by core.random.token_uniforms",
    )


def ignores_padding(objective: Objective, batch: TokenBatch, left: int, right: int) -> str | None:
    """Check that columns that no response uses do not matter."""

    def padded(x: Tensor, value: float | bool) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=value)

    tensors = {name: padded(x, -7.0) for name, x in token_tensors(batch).items()}
    wide = changed(batch, **tensors, token_mask=padded(batch.token_mask, False))
    value, gradient, prepared = loss_and_gradient(objective, wide)
    return _compare(
        loss_and_gradient(objective, batch),
        (value, gradient[:, left : left + batch.token_mask.shape[1]], prepared),
        ("without padding", f"with {left + right} columns of padding"),
        "count tokens by batch.mask, not by the width of a tensor",
    )


def survives_packing(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that the losses of single responses, cut to their length, add up to the step's."""
    if objective.whole_groups_per_loss_call:
        return None
    prepared = objective.prepare(batch, seed=SEED)
    total, gradients = batch.prev_logprobs.new_zeros(()), torch.zeros_like(batch.prev_logprobs)
    for row, length in enumerate(batch.token_mask.sum(1).tolist()):
        current = batch.next_token_logprobs[row : row + 1, :length].detach().requires_grad_()
        part = prepared.select(torch.tensor([row]), next_token_logprobs=current, length=length)
        loss, _ = objective.loss(part, **counts(batch))
        (gradients[row : row + 1, :length],) = torch.autograd.grad(loss, current)
        total = total + loss.detach()
    return _compare(
        loss_and_gradient(objective, batch),
        (total, gradients, prepared),
        ("unpacked", "one packed response at a time"),
        "terms() must not use the width or the number of rows of what it gets",
    )


def ignores_what_is_masked(objective: Objective, batch: TokenBatch, garbage: float) -> str | None:
    """Check that garbage under the mask reaches neither loss, gradient nor metrics, bit by bit."""
    value, gradient, prepared = loss_and_gradient(objective, batch)
    bad = changed(
        batch,
        **{name: torch.where(batch.mask, x, garbage) for name, x in token_tensors(batch).items()},
        rewards=torch.where(batch.sample_mask, batch.rewards, garbage),
    )
    bad_value, bad_gradient, bad_prepared = loss_and_gradient(objective, bad)
    remedy = "take sums and means over batch.mask, by core.statistics or torch.where, never by a product"
    if not (torch.equal(value, bad_value) and torch.equal(gradient, bad_gradient)):
        return (
            f"expected no effect of {garbage} outside the mask; found the loss {bad_value.item():.6g} for "
            f"{value.item():.6g}, or another gradient; {remedy}"
        )
    if bad_gradient[~batch.mask].any():
        return f"expected no gradient outside the mask; found one; {remedy}"
    changed_metrics = [n for n, x in prepared.metrics.items() if not torch.equal(x, bad_prepared.metrics[n])]
    if changed_metrics:
        return f"expected no effect of {garbage} outside the mask; found it in {changed_metrics}; {remedy}"
    return None


def metrics_add_up(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that the parts' metrics add up to the step's."""
    prepared, current = objective.prepare(batch, seed=SEED), batch.next_token_logprobs

    def metrics(rows: Sequence[Tensor] | None) -> list[dict[str, Tensor]]:
        parts = split(objective, prepared, current, rows)
        return [objective.loss(part, **counts(batch))[1] for part in parts]

    by_row = None if objective.whole_groups_per_loss_call else torch.arange(len(batch.rewards)).split(1)
    at_once, parts = metrics(None), metrics(by_row)
    for name in at_once[0]:
        one = sum((each[name] for each in at_once), torch.zeros(()))
        added = sum((part[name] for part in parts), torch.zeros(()))
        if not torch.allclose(one, added, RTOL, ATOL):
            return (
                f"expected that the parts' {name} adds up to the step's, {one.item():.6g}; found "
                f"{added.item():.6g}; give a number per token [B, T] or per response [B]; the mean is logged"
            )
    return None


def agrees_with_differences(objective: Objective, batch: TokenBatch) -> str | None:
    """Check the gradient against central differences, or against those with detached values held."""
    if any(_distance_to_differences(objective, batch, held=held) <= 1 for held in (False, True)):
        return None
    return (
        "expected that the gradient is the derivative of the loss, at least with what detach() gives held; "
        "found another one; look for .data, a hook or an operation in place in terms()"
    )


def _distance_to_differences(objective: Objective, batch: TokenBatch, *, held: bool) -> float:
    """Measure the largest error of the gradient by central differences, in units of the rounding error."""
    prepared, step, hold = objective.prepare(batch, seed=SEED), 1e-6, Held(active=held)

    def loss(current: Tensor) -> Tensor:
        with hold.again():
            return loss_of(objective, prepared, current)

    current = batch.next_token_logprobs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(current), current)
    worst = 0.0
    for row, column in torch.nonzero(batch.mask).tolist():
        ends = []
        for sign in (1, -1):
            moved = current.detach().clone()
            moved[row, column] += sign * step
            ends.append(loss(moved.requires_grad_()).detach())
        difference = ((ends[0] - ends[1]) / (2 * step)).item()
        bound = 1e-7 + 1e-4 * abs(difference)
        worst = max(worst, abs(difference - gradient[row, column].item()) / bound)
    return worst


def is_zero_without_tokens(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that a step in which no token counts has loss 0 and no gradient."""
    empty = changed(batch, token_mask=torch.zeros_like(batch.token_mask))
    value, gradient, _ = loss_and_gradient(objective, empty)
    if value == 0 and not gradient.any():
        return None
    return (
        f"expected loss 0 and no gradient where no token counts; found {value.item():.6g}; guard divisors "
        "with .clamp(min=1)"
    )


def keeps_dtype(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that a float32 step gives float32 advantages and gradient, near the float64 ones."""
    ids = torch.arange(len(batch.rewards)) * 7919  # draws go by these, not by the bits of logprobs
    batch = changed(batch, response_ids=ids)
    step = changed(batch, **token_tensors(batch, torch.float32))
    value, gradient, prepared = loss_and_gradient(objective, step)
    kinds = {prepared.advantages.dtype, gradient.dtype}
    if kinds != {torch.float32}:
        return f"expected float32 for a float32 step; found {kinds}; return .to(batch.prev_logprobs.dtype)"
    exact = loss_and_gradient(objective, batch)[0]
    if not torch.allclose(value.double(), exact, 2e-5, 1e-6):
        return (
            f"expected about {exact.item():.6g} in float32, as in float64; found {value.item():.6g}; "
            "accumulate sums in float64, as core.statistics does"
        )
    return None


def _compare(one: Any, other: Any, names: tuple[str, str], remedy: str) -> str | None:
    expected = f"expected the same {names[0]} and {names[1]}; found"
    if not torch.allclose(one[0], other[0], RTOL, ATOL):
        return f"{expected} the loss {one[0].item():.6g} and {other[0].item():.6g}; {remedy}"
    if not torch.allclose(one[1], other[1], RTOL, ATOL):
        far = (one[1] - other[1]).abs()
        row, column = divmod(int(far.argmax()), far.shape[1])
        gradients = f"{one[1][row, column].item():.6g} and {other[1][row, column].item():.6g}"
        return f"{expected} the gradient {gradients} at token {column} of row {row}; {remedy}"
    return None


class Held:
    """Records what ``detach()`` and code under ``no_grad`` give in the first call; later calls get the same.

    With these values held, a loss's gradient is its derivative. All calls must run the same operations.
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        self._values: list[Any] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Record or replay during one call of the loss."""
        if not self.active:
            yield
            return
        recorded: list[Any] = []
        earlier = self._values

        from torch.overrides import TorchFunctionMode

        stopping = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]

        class Mode(TorchFunctionMode):  # a class of torch's, which is imported on first use
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                stops = function in stopping or not torch.is_grad_enabled()
                if not (stops and isinstance(result, torch.Tensor)):
                    return result
                place = len(recorded)
                recorded.append(result.clone())
                return result if earlier is None else earlier[place].clone()

        with Mode():
            yield
        if self._values is None:
            self._values = recorded
