"""Checks of an objective on a step. Each returns None, or what was expected, what was found and the remedy.

The step's current logprobs must be a leaf with gradient, in float64.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective
from nemo_grpo.variants.checking.small_steps import (
    SEED,
    changed,
    counts,
    distinct_ids,
    loss_and_gradient,
    loss_of,
    split,
    token_tensors,
)

# In float64 another order of additions changes the last digits alone.
RTOL = 1e-9
ATOL = 1e-12


def adds_up(objective: Objective, batch: TokenBatch, parts: Sequence[Tensor]) -> str | None:
    """Check that losses and gradients of parts, each the indices of its rows, add up to the whole step's."""
    if objective.whole_groups_per_loss_call:
        return None
    return _compare(
        loss_and_gradient(objective, batch),
        loss_and_gradient(objective, batch, parts),
        ("in one piece", f"as {len(parts)} microbatches"),
        "terms() must treat every row by itself: what spans rows, such as a mean over them, belongs into "
        "shape(), and the loss is divided by the step's counts already",
    )


def ignores_order(objective: Objective, batch: TokenBatch, order: Tensor) -> str | None:
    """Check that the order of rows and the numbers of groups do not matter."""
    value, gradient, prepared = loss_and_gradient(objective, batch)
    shuffled = batch.select(order, next_token_logprobs=batch.next_token_logprobs[order])
    # Other numbers in the opposite order, so that a sort by group number is noticed, too.
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
    value, wide_gradient, prepared = loss_and_gradient(objective, wide)
    gradient = wide_gradient[:, left : left + batch.token_mask.shape[1]]
    return _compare(
        loss_and_gradient(objective, batch),
        (value, gradient, prepared),
        ("without padding", f"with {left + right} columns of padding"),
        "count tokens by batch.mask, not by the width of a tensor",
    )


def survives_packing(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that the losses of single responses, cut to their length, add up to the step's."""
    if objective.whole_groups_per_loss_call:
        return None
    prepared = objective.prepare(batch, seed=SEED)
    total = batch.prev_logprobs.new_zeros(())
    gradients = torch.zeros_like(batch.prev_logprobs)
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
    tensors = {name: torch.where(batch.mask, x, garbage) for name, x in token_tensors(batch).items()}
    rewards = torch.where(batch.sample_mask, batch.rewards, garbage)
    bad = changed(batch, **tensors, rewards=rewards)
    bad_value, bad_gradient, bad_prepared = loss_and_gradient(objective, bad)
    remedy = "take sums and means over batch.mask, by core.statistics or torch.where, never by a product"
    if not (torch.equal(value, bad_value) and torch.equal(gradient, bad_gradient)):
        return (
            f"expected no effect of {garbage} outside the mask; found the loss {bad_value.item():.6g} for "
            f"{value.item():.6g}, or another gradient; {remedy}"
        )
    if bad_gradient[~batch.mask].any():
        return f"expected no gradient outside the mask; found one; {remedy}"
    changed_metrics = [
        name
        for name, number in prepared.metrics.items()
        if not torch.equal(number, bad_prepared.metrics[name])
    ]
    if changed_metrics:
        return f"expected no effect of {garbage} outside the mask; found it in {changed_metrics}; {remedy}"
    return None


def metrics_add_up(objective: Objective, batch: TokenBatch) -> str | None:
    """Check that the parts' metrics add up to the step's."""
    prepared = objective.prepare(batch, seed=SEED)

    def summed_metrics(rows: Sequence[Tensor] | None) -> dict[str, Tensor]:
        sums = dict[str, Tensor]()
        for part in split(objective, prepared, batch.next_token_logprobs, rows):
            for name, share in objective.loss(part, **counts(batch))[1].items():
                sums[name] = sums[name] + share if name in sums else share
        return sums

    single_rows = torch.arange(len(batch.rewards)).split(1)
    whole = summed_metrics(None)
    added = summed_metrics(None if objective.whole_groups_per_loss_call else single_rows)
    for name, number in whole.items():
        if not torch.allclose(number, added[name], RTOL, ATOL):
            return (
                f"expected that the parts' {name} adds up to the step's, {number.item():.6g}; found "
                f"{added[name].item():.6g}; give a number per token [B, T] or per response [B]; the mean is "
                "logged"
            )
    return None


def agrees_with_differences(objective: Objective, batch: TokenBatch) -> str | None:
    """Check the gradient against central differences of the loss.

    Differences that keep the detached values of the first call are accepted, too.
    """
    # A loss that detaches a weight agrees only with differences that keep the weight.
    for keeps_detached in (False, True):
        if _distance_to_differences(objective, batch, keeps_detached=keeps_detached) <= 1:
            return None
    return (
        "expected that the gradient is the derivative of the loss, at least with what detach() gives held; "
        "found another one; look for .data, a hook or an operation in place in terms()"
    )


def _distance_to_differences(objective: Objective, batch: TokenBatch, *, keeps_detached: bool) -> float:
    """Measure the largest error of the gradient by central differences, in units of the rounding error."""
    prepared = objective.prepare(batch, seed=SEED)
    step = 1e-6  # nats
    detached_values = DetachedValues(active=keeps_detached)

    def loss(current: Tensor) -> Tensor:
        with detached_values.again():
            return loss_of(objective, prepared, current)

    def loss_at(row: int, column: int, change: float) -> Tensor:
        logprobs = current.detach().clone()
        logprobs[row, column] += change
        return loss(logprobs.requires_grad_()).detach()

    current = batch.next_token_logprobs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(current), current)
    worst = 0.0
    for row, column in torch.nonzero(batch.mask).tolist():
        rise = loss_at(row, column, step) - loss_at(row, column, -step)
        difference = (rise / (2 * step)).item()
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
    batch = changed(batch, response_ids=distinct_ids(len(batch.rewards)))
    step = changed(batch, **token_tensors(batch, torch.float32))
    value, gradient, prepared = loss_and_gradient(objective, step)
    dtypes = {prepared.advantages.dtype, gradient.dtype}
    if dtypes != {torch.float32}:
        return f"expected float32 for a float32 step; found {dtypes}; return .to(batch.prev_logprobs.dtype)"
    exact = loss_and_gradient(objective, batch)[0]
    if not torch.allclose(value.double(), exact, 2e-5, 1e-6):
        return (
            f"expected about {exact.item():.6g} in float32, as in float64; found {value.item():.6g}; "
            "accumulate sums in float64, as core.statistics does"
        )
    return None


def _compare(
    first: tuple[Tensor, Tensor, PreparedBatch],
    second: tuple[Tensor, Tensor, PreparedBatch],
    names: tuple[str, str],
    remedy: str,
) -> str | None:
    """Compare two results of `loss_and_gradient`.

    Args:
        first: (loss, gradient, prepared step).
        second: the same for the changed step, with the gradient's rows in the order of the first.
        names: names of the two results, for the sentence "expected the same NAME and NAME".
        remedy: end of the message.
    Returns: None, or the message.
    """
    expected = f"expected the same {names[0]} and {names[1]}; found"
    first_loss, first_gradient, _ = first
    second_loss, second_gradient, _ = second
    if not torch.allclose(first_loss, second_loss, RTOL, ATOL):
        return f"{expected} the loss {first_loss.item():.6g} and {second_loss.item():.6g}; {remedy}"
    if not torch.allclose(first_gradient, second_gradient, RTOL, ATOL):
        distance = (first_gradient - second_gradient).abs()
        row, column = divmod(int(distance.argmax()), distance.shape[1])
        first_value = first_gradient[row, column].item()
        second_value = second_gradient[row, column].item()
        return (
            f"{expected} the gradient {first_value:.6g} and {second_value:.6g} at token {column} of row "
            f"{row}; {remedy}"
        )
    return None


class DetachedValues:
    """Records the results of ``detach()`` and of code under ``no_grad``, and returns them in later calls.

    With these values kept, a loss's gradient is its derivative. Results are matched by their order, so every
    call of the loss must run the same operations as the first.
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
        # torch is imported on first use, so its class cannot be a base outside a function.
        from torch.overrides import TorchFunctionMode

        recorded: list[Any] = []
        earlier = self._values
        detaching = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                is_detached = function in detaching or not torch.is_grad_enabled()
                if not (is_detached and isinstance(result, torch.Tensor)):
                    return result
                index = len(recorded)
                # Clones, because later operations may write into a result in place.
                recorded.append(result.clone())
                if earlier is None:
                    return result
                return earlier[index].clone()

        with Mode():
            yield
        if self._values is None:
            self._values = recorded
