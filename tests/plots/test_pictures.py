"""Figures of attention, positions and confusion."""

from __future__ import annotations

import itertools
import warnings
from io import BytesIO

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontEntry, fontManager
from matplotlib.text import Text

from lightning_tfm.callbacks.attention_logger import short_name
from lightning_tfm.inference.attention_maps import AttentionMap
from lightning_tfm.plots.pictures import (
    MAX_HEIGHT,
    draw_attention,
    draw_confusion,
    draw_positions,
    missing_glyphs_named,
)
from lightning_tfm.plots.style import COLUMNS, PALETTE


@pytest.mark.parametrize("size", [3, 11, 40])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_long_title_fits_into_its_figure(heads, size):
    """Check that the title overlaps neither the panels nor the edges of the figure."""
    sentences = " ".join(["Ein Mann schläft in einem grünen Raum auf einem Sofa."] * 2)
    title = f"example 7: {sentences}\ntrue: {sentences}\npredicted: {sentences}"
    symbols = ["Sofa"] * size
    weights = torch.ones(heads, size, size) / size
    figure = draw_attention(AttentionMap("decoder.0.cross_attention", weights, symbols, symbols, []), title)
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert max(axes.get_tightbbox().y1 for axes in figure.axes) <= box.y0 < box.y1 <= figure.bbox.height


@pytest.mark.parametrize(("largest", "darkest"), [(1.0, 1.0), (0.5, 1.0), (0.25, 0.25)])
def test_the_darkest_color_is_a_weight_of_1_or_the_largest_of_diffuse_attention(largest, darkest):
    weights = torch.full((2, 3, 8), 0.125)
    weights[1, 2, 3] = largest
    figure = draw_attention(AttentionMap("layers.0.self_attention", weights, list("abc"), list("abcdefgh"), []))
    assert [axes.images[0].get_clim() for axes in figure.axes[:2]] == [(0, darkest)] * 2


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "columns"), [(1, 9, 9, 1), (2, 9, 9, 2), (4, 9, 9, 2), (2, 5, 40, 1)]
)
def test_heads_are_placed_so_that_labels_stay_legible(heads, rows, keys, columns):
    """Place at most two panels in a row, and wide ones below each other; no label reaches the next panel."""
    symbols = ["a", " ", "Straßenbahn", *"bcdefgh"] * 4
    weights = torch.ones(heads, rows, keys) / keys
    figure = draw_attention(AttentionMap("layers.0.self_attention", weights, symbols[:rows], symbols[:keys], []))
    figure.draw_without_rendering()
    panels = figure.axes[:-1]
    assert len({panel.get_window_extent().x0 for panel in panels}) == columns
    assert [label.get_text() for label in panels[-1].get_xticklabels()][:3] == ["a", "\N{OPEN BOX}", "Straßenbahn"]
    boxes = [panel.get_tightbbox() for panel in panels]
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("heads", "rows", "keys"), [(1, 5, 4), (1, 64, 64), (4, 11, 20), (8, 64, 30), (2, 5, 40)])
def test_attention_in_a_publication(heads, rows, keys, columns):
    """The figure has the width of the columns and fits on a page, and its letters have at least 7 points."""
    symbols = ["a", " ", "Straßenbahnhaltestelle", *"bcdefgh"] * 7
    weights = torch.ones(heads, rows, keys) / keys
    attention = AttentionMap("a", weights, symbols[:rows], symbols[:keys], [(1, 2)], predicts="target")
    figure = draw_attention(attention, "title", columns)
    figure.draw_without_rendering()
    assert figure.get_figwidth() == COLUMNS[columns]
    assert figure.get_figheight() <= MAX_HEIGHT + 1.5
    box = figure.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= COLUMNS[columns]
    assert 0 <= box.y0 < box.y1 <= figure.get_figheight()
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    assert "target symbol" in {text.get_text() for text in texts}
    assert figure.get_suptitle() == ""
    panels = [panel.get_tightbbox() for panel in figure.axes[:-1]]
    assert not any(panel.overlaps(other) for panel, other in itertools.combinations(panels, 2))


def test_layers_have_short_names_in_file_names():
    layers = ["decoder.1.cross_attention", "layers.10.self_attention", "attention", "stack.blocks.0.mix"]
    assert [*map(short_name, layers)] == ["decoder1_cross", "layer10_self", "attention", "stack_block0_mix"]


def test_positions_are_drawn():
    weight = torch.randn(20, 16)
    figure = draw_positions(weight)
    assert figure.axes[0].images[0].get_array().shape == (16, 20)
    assert len(figure.axes[1].lines) == 4
    assert figure.get_suptitle()
    weight.untyped_storage().resize_(0)  # FSDP can still free it


@pytest.mark.parametrize("size", [2, 20, 21, 200])
def test_a_confusion_matrix_of_any_size_can_be_drawn(size):
    """Counts are written only where they fit, the size of the figure is limited, and ticks have the right labels."""
    labels = [f"label {n}" for n in range(size)]
    figure = draw_confusion(labels, {(labels[0], labels[1]): 5, (labels[1], labels[1]): 2_000})
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert figure.get_suptitle() == "2,000 of 2,005 correct"
    assert [text.get_text() for text in axes.texts if text.get_text() != "0"] == (["5", "2,000"] if size <= 20 else [])
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert 2 <= len(ticks) <= 60
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        assert label.get_text() == labels[int(place)]
    assert max(figure.get_size_inches()) <= 20


DICHROMACY = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}

"""Matrices that map linear RGB to what color-blind readers see (Machado et al. 2009)."""


@pytest.mark.parametrize("kind", DICHROMACY)
def test_color_blind_readers_can_tell_the_palette_apart(kind):
    rgb = torch.tensor([to_rgb(color) for color in PALETTE])
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = (linear @ torch.tensor(DICHROMACY[kind]).T).clamp(0, 1)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    scaled = seen @ to_xyz.T / torch.tensor([0.9505, 1.0, 1.089])
    x, y, z = torch.where(scaled > 0.008856, scaled.clamp(min=1e-9) ** (1 / 3), 7.787 * scaled + 16 / 116).T
    lab = torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)
    distances = torch.pdist(lab)  # CIE76: 2.3 is just noticeable
    assert distances.min() > 10


def test_characters_are_drawn_with_any_font_that_has_them():
    """STIX, which matplotlib contains, has characters that the default font lacks; a missing one would be a warning."""
    figure = draw_attention(AttentionMap("layer", torch.rand(1, 2, 2), ["\u1d84", "a"], ["b", "\u1d8a"], []), "\u1d81")
    figure.savefig(BytesIO())
    draw_confusion(["a", "\u1d84"], {}).savefig(BytesIO())


def test_characters_that_no_font_has_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(fontManager, "ttflist", [FontEntry("deleted.ttf", "Deleted")])
    with missing_glyphs_named():
        for symbols in (["\u732b", "a"], ["\u732b", "\u72ac"]):
            draw_attention(AttentionMap("layer", torch.rand(1, 2, 2), symbols, symbols, [])).savefig(BytesIO())
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 characters that no installed font has, such as '\u732b'; install a font" in line
    with pytest.warns(UserWarning, match="another"), missing_glyphs_named():
        warnings.warn("another", UserWarning, stacklevel=1)
