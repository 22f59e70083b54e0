"""Colours that stay apart for colour-blind readers and mean the same in every picture."""


def depth_colours(num_depths: int) -> list[str]:
    """A colour "#rrggbb" per generator depth, dark for shallow and light for deep (viridis, an ordered scale).

    The last fifth of the scale is too pale for thin lines on white and is left out.
    """
    from matplotlib import colormaps, colors

    scale = colormaps["viridis"]
    return [colors.to_hex(scale(0.8 * i / max(num_depths - 1, 1))) for i in range(num_depths)]


def suspicion_colour(probability: float) -> str:
    """White at 0 to orange at 1: the background of a token by its probability of being replaced; black text stays
    readable on all of it."""
    white, orange = (255, 255, 255), (230, 159, 0)
    mixed = (round(w + (o - w) * probability) for w, o in zip(white, orange, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
