"""Checks of tensors' values: an error at once on a CPU, and on a GPU without waiting for the device."""

from nemo_grpo.core.lazy import Tensor, torch


def require(holds: Tensor, values: Tensor, name: str, rule: str) -> None:
    """Check a rule about every element of ``values``.

    Args:   holds: bool, of the shape of ``values``.  rule: ends the sentence "NAME[INDEX] is VALUE; ...".
    Raises: ValueError: an element breaks it, with its index. On a GPU the kernel that finds it stops the
            process instead (`torch._assert_async`), with the rule only: reading the value would wait.
    """
    if holds.device.type != "cpu":
        torch._assert_async(holds.all(), f"{name}: {rule}")
    elif not holds.all():
        index = tuple(torch.nonzero(~holds)[0].tolist())
        place = ", ".join(map(str, index))
        raise ValueError(f"{name}[{place}] is {values[index].item()}; {rule}")
