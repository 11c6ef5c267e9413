"""The equations once more, as plain Python loops: slow, obvious, no code shared with the package.

A step is a list of groups of responses; a response has lists cur, prev, ref, ent, and its reward r.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

Response = dict[str, Any]
Step = list[list[Response]]


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def pstd(xs: list[float]) -> float:
    m = mean(xs)
    return math.sqrt(mean([(x - m) ** 2 for x in xs]))


def zscores(xs: list[float], delta: float = 1e-4) -> list[float]:
    if not xs:
        return []
    m, s = mean(xs), pstd(xs)
    # The mean of equal numbers may differ from them in the last digit, and 1e-16 over delta is not nothing.
    return [0.0 if s < 1e-15 else (x - m) / (s + delta) for x in xs]


def group_advantages(group: list[Response], eps: float = 1e-6, scale: bool = True) -> list[float]:
    rewards = [o["r"] for o in group]
    if len(set(rewards)) == 1:
        return [0.0] * len(group)
    f = statistics.stdev(rewards) + eps if scale else 1.0  # ddof 1
    return [(r - mean(rewards)) / f for r in rewards]


def clipped(rho: float, a: float, low: float, high: float) -> float:
    return min(rho * a, min(max(rho, 1 - low), 1 + high) * a)


def k3(o: Response, t: int, w: float = 1.0) -> float:
    x = w * math.exp(o["ref"][t] - o["cur"][t])
    return x - math.log(x) - 1


def tokens(step: Step) -> int:
    return sum(len(o["cur"]) for group in step for o in group)


def mean_over_groups(loss: Callable[..., float], step: Step, **parameters: Any) -> float:
    """1 / sum_i |o_i| inside the expectation over prompts: the loss of each group alone, averaged."""
    return mean([loss([group], **parameters) for group in step if tokens([group])])


def grpo(step: Step, low: float = 0.2, high: float = 0.2, beta: float = 0.0) -> float:
    total = 0.0
    for group in step:
        for o, a in zip(group, group_advantages(group), strict=True):
            for t in range(len(o["cur"])):
                rho = math.exp(o["cur"][t] - o["prev"][t])
                total += clipped(rho, a, low, high) - beta * (k3(o, t) if beta else 0.0)
    return -total / tokens(step)


def gspo(step: Step, low: float = 3e-4, high: float = 4e-4) -> float:
    terms = []
    for group in step:
        for o, a in zip(group, group_advantages(group), strict=True):
            drift = [c - p for c, p in zip(o["cur"], o["prev"], strict=True)]
            terms.append(clipped(math.exp(mean(drift)), a, low, high) if drift else 0.0)
    return -mean(terms)


def cispo(step: Step, low: float = 1.0, high: float = 5.0, beta: float = 0.0) -> float:
    total = 0.0
    for group in step:
        for o, a in zip(group, group_advantages(group), strict=True):
            for t in range(len(o["cur"])):
                rho = math.exp(o["cur"][t] - o["prev"][t])
                weight = min(max(rho, 1 - low), 1 + high)
                total += weight * a * o["cur"][t] - beta * (k3(o, t) if beta else 0.0)
    return -total / tokens(step)


def dr_grpo(step: Step, max_response_length: int) -> float:
    total = 0.0
    for group in step:
        for o, a in zip(group, group_advantages(group, scale=False), strict=True):
            for t in range(len(o["cur"])):
                total += clipped(math.exp(o["cur"][t] - o["prev"][t]), a, 0.2, 0.2)
    return -total / (sum(map(len, step)) * max_response_length)


def cw_grpo(step: Step, beta: float = 0.04, sigma_is_infinite: bool = False) -> float:
    per_response = []
    for group in step:
        advantages = group_advantages(group, eps=1e-4)
        c = [
            [(x - mean(o["prev"])) * (a - mean(advantages)) for x in o["prev"]] if o["prev"] else []
            for o, a in zip(group, advantages, strict=True)
        ]
        flat = [x for row in c for x in row]
        sigma = pstd(flat) if flat else 0.0
        w = [
            [1.0 if sigma == 0 or sigma_is_infinite else math.exp(-(x**2) / (2 * sigma**2)) for x in row]
            for row in c
        ]
        norm = len(flat) / sum(x for row in w for x in row) if flat else 1.0
        for o, a, row in zip(group, advantages, w, strict=True):
            terms = [
                math.exp(o["cur"][t] - o["prev"][t]) * row[t] * norm * a - beta * k3(o, t)
                for t in range(len(row))
            ]
            per_response.append(mean(terms) if terms else 0.0)
    return -mean(per_response)


def tr_weight(
    pi: float, alpha: float = 2.0, mu: float = 0.25, tau: float = 9.0, lo: float = 1.0, hi: float = 1.4
) -> float:
    return min(max(alpha * (1 / (1 + math.exp(-tau * pi)) - mu), lo), hi)


def tr_grpo(step: Step, beta: float = 0.001, placement: str = "outside", upper: float = 1.4) -> float:
    total = 0.0
    for group in step:
        for o, a in zip(group, group_advantages(group), strict=True):
            for t in range(len(o["cur"])):
                w, rho = tr_weight(math.exp(o["cur"][t]), hi=upper), math.exp(o["cur"][t] - o["prev"][t])
                policy = (
                    w * clipped(rho, a, 0.2, 0.24)
                    if placement == "outside"
                    else clipped(w * rho, a, 0.2, 0.24)
                )
                total += policy - beta * k3(o, t, w)
    return -total / tokens(step)


def erpo_advantages(
    step: Step, buckets: int, eta: float = 0.2, delta: float = 1e-4
) -> list[list[list[float]]]:
    base = [group_advantages(group) for group in step]
    psi: list[list[list[float]]] = []
    for group, advantages in zip(step, base, strict=True):
        entropy = (
            iter(zscores([h for o in group for h in o["ent"]], delta))
            if any(o["ent"] for o in group)
            else iter(())
        )
        gate = [[1 / (1 + math.exp(-5.0 * next(entropy))) for _ in o["ent"]] for o in group]
        where = [
            [min(buckets * (t + 1) // len(o["cur"]), buckets - 1) for t in range(len(o["cur"]))]
            for o in group
        ]
        progress = [[0.1 * (p - q) for p, q in zip(o["prev"], o["ref"], strict=True)] for o in group]
        s: list[list[float]] = [[0.0] * len(o["cur"]) for o in group]
        for k in range(buckets):
            at = [(i, t) for i, row in enumerate(where) for t, b in enumerate(row) if b == k]
            for (i, t), z in zip(
                at, zscores([progress[i][t] for i, t in at], delta) if at else [], strict=True
            ):
                s[i][t] = z
        signs = [(a > 0) - (a < 0) for a in advantages]
        psi.append(
            [
                [g * sign * z for g, z in zip(gr, sr, strict=True)]
                for gr, sign, sr in zip(gate, signs, s, strict=True)
            ]
        )
    active = [x for group, rows in zip(base, psi, strict=True) if any(group) for row in rows for x in row]
    scale = 1.0 / (pstd(active) + delta) if active else 0.0
    result = []
    for advantages, rows in zip(base, psi, strict=True):
        if not any(advantages):
            result.append([[0.0] * len(row) for row in rows])
            continue
        final = iter(
            zscores(
                [a + eta * scale * x for a, row in zip(advantages, rows, strict=True) for x in row], delta
            )
        )
        result.append([[next(final) for _ in row] for row in rows])
    return result


def erpo(step: Step, buckets: int = 10, beta: float = 0.001) -> float:
    total = 0.0
    for group, rows in zip(step, erpo_advantages(step, buckets), strict=True):
        for o, a in zip(group, rows, strict=True):
            for t in range(len(a)):
                total += clipped(math.exp(o["cur"][t] - o["prev"][t]), a[t], 0.2, 0.2) - beta * k3(o, t)
    return -total / tokens(step)


def gpg(step: Step, beta: float = 0.0) -> float:
    num = sum(map(len, step))
    dead = sum(len(group) for group in step if len({o["r"] for o in group}) == 1)
    penalty = beta * sum(k3(o, t) for group in step for o in group for t in range(len(o["cur"])))
    if dead == num:
        return penalty / tokens(step)
    total = sum(
        x * a
        for group in step
        for o, a in zip(group, group_advantages(group, scale=False), strict=True)
        for x in o["cur"]
    )
    return (penalty - num / (num - dead) * total) / tokens(step)
