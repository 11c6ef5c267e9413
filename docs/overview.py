"""Draw docs/overview.svg, the picture of the whole in README: ``python docs/overview.py``."""

from pathlib import Path
from xml.sax.saxutils import escape

INK, PALE, SHARED, EMBEDDED, CLUSTER = "#333333", "#777777", "#eef3f8", "#e6f4ee", "#fdf0e4"
WIDTH, HEIGHT, GAP, LEFT = 124, 74, 26, 96
"""Of a box, of the space between two, and of the lanes' names, in pixels."""
TOP = 58

STAGES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("prompts", ("of the task", "tasks/, data/"), ()),
    ("rollout", ("own decoder", "sampling/"), ("vLLM", "or SGLang, Megatron")),
    ("reward", ("of the task", "tasks/rewards/"), ()),
    ("objective", ("the variant's loss", "core/, variants/"), ()),
    ("update", ("Megatron-core", "TP, PP, DP on CPUs"), ("Megatron-core", "TE FP8, TP/PP/CP/EP")),
    ("checkpoint", ("torch_dist", "resumes bit-equal"), ("torch_dist", "of Megatron-Bridge")),
    ("export", ("Hugging Face", "checkpoints_conv/"), ()),
)
"""Name, what the embedded engine does there, and what NeMo-RL does; without the last, both use the first."""


def text(x: float, y: float, words: str, size: int = 12, fill: str = INK, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, height: float, fill: str, lines: tuple[str, ...]) -> list[str]:
    """A rectangle with its first line in bold and the second in small letters, in its middle."""
    middle, center = y + height / 2, x + WIDTH / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{height:g}" rx="6" fill="{fill}" stroke="#bbb"/>',
        text(center, middle - 3, lines[0], 12, INK, 'text-anchor="middle" font-weight="bold"'),
        text(center, middle + 14, lines[1], 10, PALE, 'text-anchor="middle"'),
    ]


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{PALE}" marker-end="url(#head)"/>'
    )


def picture() -> str:
    """The two engines as lanes, with the stages that they share across both."""
    lanes = (TOP, TOP + HEIGHT + 18)
    both = lanes[1] + HEIGHT - lanes[0]
    width = LEFT + len(STAGES) * (WIDTH + GAP)
    drawn = [
        text(12, lanes[0] + 34, "embedded", 13, INK, 'font-weight="bold"'),
        text(12, lanes[0] + 50, "CPU or GPU", 10, PALE),
        text(12, lanes[1] + 34, "NeMo-RL", 13, INK, 'font-weight="bold"'),
        text(12, lanes[1] + 50, "Ray on Slurm", 10, PALE),
        text(LEFT, 20, "one recipe (YAML): checked, planned, rehearsed", 12, INK, 'font-weight="bold"'),
    ]
    for place, (name, embedded, cluster) in enumerate(STAGES):
        x = LEFT + place * (WIDTH + GAP)
        drawn.append(text(x + WIDTH / 2, TOP - 12, name, 12, PALE, 'text-anchor="middle"'))
        if cluster:
            drawn += [
                *box(x, lanes[0], HEIGHT, EMBEDDED, embedded),
                *box(x, lanes[1], HEIGHT, CLUSTER, cluster),
            ]
        else:
            drawn += box(x, lanes[0], both, SHARED, embedded)
        if place:
            drawn += [arrow(x - GAP + 2, y + HEIGHT / 2, x - 3, y + HEIGHT / 2) for y in lanes]
    # The updated weights go back to the sampler.
    update, rollout = (LEFT + n * (WIDTH + GAP) + WIDTH / 2 for n in (4, 1))
    below = lanes[1] + HEIGHT
    back = f"M {update:g} {below} v 20 H {rollout:g} v -17"
    drawn.append(f'<path d="{back}" fill="none" stroke="{PALE}" marker-end="url(#head)"/>')
    drawn.append(
        text((update + rollout) / 2, below + 15, "refit: new weights", 10, PALE, 'text-anchor="middle"')
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"',
            f'     viewBox="0 0 {width} {below + 32}">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"',
            f'              orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{PALE}"/></marker></defs>',
            '<rect width="100%" height="100%" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
