"""Colours: styles of lines, scales of heat maps, and pictures made of cells of colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from pe_lab.results.variants import KINDS


@dataclass(frozen=True)
class Style:
    """A line's colour (a name in the stylesheet), dash pattern and width."""

    colour: str
    dash: str | None = None
    width: float = 2.0


# Hue is the scheme (grey RoPE, green dropped, orange NoPE), dash the variant. The hues are those of Okabe and Ito,
# darkened.
STYLES = dict(
    zip(
        KINDS,
        (
            Style("rope", None, 2.4),
            Style("rope", "2 4"),
            Style("pi", "8 4"),
            Style("ntk", "11 3 2 3"),
            Style("yarn"),
            Style("drope", "6 4", 2.4),
            Style("drope", "2 3", 2.4),
            Style("drope", None, 3.0),
            Style("nope", "3 3"),
            Style("nope", "7 3"),
            Style("nope"),
        ),
        strict=True,
    )
)
INK = Style("ink")
SPARE = ("extra-1", "extra-2", "extra-3", "extra-4")
# Of several runs, of sources, and of lines that are no variants: first those that no variant has.
COLOURS = ("ntk", "nope", "drope", "yarn", "pi", "extra-1", "rope", "extra-3", "extra-4", "extra-2")
RUN_COLOURS = ("extra-1", "extra-3", "extra-4", "extra-2", "ntk", "nope", "drope", "yarn", "pi", "rope")
DASHES = (None, "7 3", "2 3", "9 3 2 3")


def run_style(index: int) -> Style:
    """The style of a run, or of a source, among several."""
    return Style(RUN_COLOURS[index % len(RUN_COLOURS)], None if index < len(RUN_COLOURS) else "6 3")


# ---------------------------------------------------------------------------------------------------------------------
# Scales

# matplotlib's viridis: perceptually uniform, safe for the colour-blind, and in order of lightness when printed in grey.
VIRIDIS = base64.b64decode(
    "RAFURAJVRANXRQVYRQZaRQhbRglcRgteRgxfRg5hRw9iRxFjRxJlRxRmRxVnRxZpRxhqSBlrSBpsSBxuSB1vSB5wSCBxSCFySCJzSCN0RyV1RyZ2"
    "Ryd3Ryh4Ryp5Ryt6Ryx7Ri18Ri98RjB9RjF+RTJ/RTR/RTWARTaBRDeBRDmCQzqDQzuDQzyEQj2EQj6FQkCFQUGGQUKGQEOHQESHP0WHP0eIPkiI"
    "PkmJPUqJPUuJPUyJPE2KPE6KO1CKO1GKOlKLOlOLOVSLOVWLOFaLOFeMN1iMN1mMNlqMNluMNVyMNV2MNF6NNF+NM2CNM2GNMmKNMmONMWSNMWWN"
    "MWaNMGeNMGiNL2mNL2qNLmuOLmyOLm2OLW6OLW+OLHCOLHGOLHKOK3OOK3SOKnWOKnaOKneOKXiOKXmOKHqOKHqOKHuOJ3yOJ32OJ36OJn+OJoCO"
    "JoGOJYKOJYONJISNJIWNJIaNI4eNI4iNI4mNIomNIoqNIouNIYyNIY2MIY6MII+MIJCMIJGMH5KMH5OLH5SLH5WLH5aLHpeKHpiKHpmKHpmKHpqJ"
    "HpuJHpyJHp2IHp6IHp+IHqCHH6GHH6KGH6OGIKSFIKWFIaaFIaeEIqeEI6iDI6mCJKqCJauBJqyBJ62AKK5/Ka9/KrB+K7F9LLF9LrJ8L7N7MLR6"
    "MrV6M7Z5Nbd4Nrh3OLl2Obl2O7p1Pbt0PrxzQL1yQr5xRL5wRb9vR8BuScFtS8JsTcJrT8NpUcRoU8VnVcZmV8ZlWcdkW8hiXslhYMlgYspfZMtd"
    "Z8xcacxba81Zbc5YcM5Wcs9VdNBUd9BSedFRfNJPftJOgdNMg9NLhtRJiNVHi9VGjdZEkNZDktdBldc/l9g+mtg8ndk6n9k4oto3pdo1p9szqtsy"
    "rdwwr9wust0std0rt90put4nvd4mv98kwt8ixd8hx+AfyuAezeAdz+Ec0uEb1OEa1+IZ2uIY3OIY3+MY4eMY5OMY5+QZ6eQZ7OQa7uUb8eUc8+Ue"
    "9uYf+OYh+uYi/eck"
)
# ColorBrewer's RdBu, from blue over white, which is 0, to red.
BLUE_TO_RED = (
    *("#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7"),
    *("#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"),
)
# Of needles: one hue, for readers who do not tell hues apart; found is dark on light pages and bright on dark ones.
LIGHT = ("#eef2ef", "#c3e5d6", "#74c6a7", "#1f8f6c", "#004f39")
DARK = ("#262d32", "#1e4a40", "#1f7a60", "#38b88e", "#a5f2d5")
INKS = ("#04100b", "#ffffff")
STEPS = 20  # of colour between none found and all found
HATCH = ((236, 237, 234), (190, 192, 188))  # paper and stroke of what was not measured


def scale_colours(scale: str, shares: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "... 3"]:
    """Red, green and blue of shares 0..1 of a scale: `sequential`, `diverging` or `found`."""
    steps = STEPS if scale == "found" else 255
    index = np.round(STEPS * np.nan_to_num(shares)) if scale == "found" else np.floor(np.nan_to_num(shares) * 256)
    index = np.clip(index, 0, steps).astype(int)
    if scale == "sequential":
        return np.frombuffer(VIRIDIS, np.uint8).reshape(256, 3)[index]
    return mixed(BLUE_TO_RED if scale == "diverging" else LIGHT, index / steps)


def mixed(anchors: Sequence[str], shares: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "... 3"]:
    """Red, green and blue at shares of the way from the first to the last of some colours."""
    places, by_channel = np.linspace(0, 1, len(anchors)), zip(*map(channels, anchors), strict=True)
    return np.stack([np.interp(shares, places, values) for values in by_channel], -1).round().astype(np.uint8)


def cell_colours(scale: str, values: Float[np.ndarray, "..."], ends: tuple[float, float]) -> UInt8[np.ndarray, "... 4"]:
    """Red, green, blue and opacity of values between two ends; those that were not measured are transparent."""
    low, high = ends
    shares = np.clip((np.asarray(values, np.float64) - low) / (high - low), 0, 1)
    opaque = ~np.isnan(shares)[..., None]
    return np.concatenate([scale_colours(scale, shares) * opaque, 255 * opaque], -1).astype(np.uint8)


def step(score: float) -> int:
    """The index of a score's colour, of STEPS + 1."""
    return round(STEPS * min(max(score, 0.0), 1.0))


def step_colours(index: int, anchors: Sequence[str] = LIGHT) -> tuple[str, str]:
    """Background and ink of a step: a mix of its neighbours in `anchors`, and the ink with more contrast to it."""
    background = f"#{mixed(anchors, np.asarray(index / STEPS)).tobytes().hex()}"
    return background, max(INKS, key=lambda ink: contrast(ink, background))


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2), 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio (WCAG 2), 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def palette_css() -> str:
    """Rules `.h0` to `.h20` for light and dark pages."""
    light, dark = (
        "".join(
            f".h{index}{{background:{background};color:{ink}}}"
            for index in range(STEPS + 1)
            for background, ink in [step_colours(index, anchors)]
        )
        for anchors in (LIGHT, DARK)
    )
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def picture(colours: UInt8[np.ndarray, "Y X C"], pixels: int = 1) -> str:
    """A PNG picture of cells of `pixels` a side, as the address of an image.

    Of 3 channels, or 4 with opacity; of `pixels` above 1 cells without opacity are hatched. Large cells are for files:
    no viewer then smooths a cell into its neighbours.
    """
    from PIL import Image

    palette, index = np.unique(colours.reshape(-1, colours.shape[-1]), axis=0, return_inverse=True)
    index = index.reshape(colours.shape[:2]).repeat(pixels, 0).repeat(pixels, 1)
    opacity = palette[:, 3] if palette.shape[1] == 4 else np.full(len(palette), 255, np.uint8)
    palette = palette[:, :3]
    if pixels > 1 and (opacity == 0).any():
        hatch = (np.add(*np.indices(index.shape)) % 6 == 0).astype(int)
        index = np.where(opacity[index] == 0, len(palette) + hatch, index)
        palette, opacity = np.concatenate([palette, HATCH]), np.append(opacity, (255, 255))
    buffer = io.BytesIO()
    if len(palette) > 256:
        shown = np.concatenate([palette, opacity[:, None]], 1).astype(np.uint8)[index]
        Image.fromarray(shown).save(buffer, "png", optimize=pixels == 1)
    else:  # a byte a cell; the opacity of each colour is a chunk of its own
        image = Image.fromarray(index.astype(np.uint8))
        image.putpalette(np.ascontiguousarray(palette, np.uint8).tobytes())
        known = {} if pixels > 1 else {"transparency": opacity.astype(np.uint8).tobytes()}
        image.save(buffer, "png", optimize=pixels == 1, **known)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
