"""Attention maps: alignment scores equal their definitions, and figures show the computed weights."""

from __future__ import annotations

import calendar
import itertools
import math
import warnings
from datetime import date
from io import BytesIO

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontEntry, fontManager

from lightning_tfm.callbacks.attention_logger import short_name
from lightning_tfm.data import Pair, PairDataset
from lightning_tfm.inference.attention_maps import AttentionMap
from lightning_tfm.layers import attention_maps
from lightning_tfm.networks import GPT
from lightning_tfm.plots.pictures import draw_attention, draw_confusion, draw_positions, missing_glyphs_named
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tasks.alignment import AlignmentScores, gold_links
from lightning_tfm.tokenization import EOS, PAD, SymbolTokenizer
from support.data import DATA


def attention(network, tokenizer, pair):
    return Seq2SeqModule(network, tokenizer, 10).attention(pair._asdict())


def scores_by_definition(weights, pairs, split):
    """Compute accuracy, alignment error rate and entropy of each head by definition, link by link."""
    heads = weights.size(1)
    scores = []
    for head in range(heads):
        found, sure, possible, accurate, linked, entropies = set(), set(), set(), 0, 0, []
        for row, pair in enumerate(pairs):
            source, target = split(pair.source), split(pair.target)
            for j in range(len(target)):
                own = weights[row, head, j].tolist()
                attended = max(range(len(own)), key=own.__getitem__)
                entropies.append(-sum(w * math.log(w) for w in own if w > 0))
                if attended < len(source):
                    found.add((row, attended, j))
                sources = {i for i, other in pair.alignment if other == j}
                linked += bool(sources)
                accurate += attended in sources
                possible |= {(row, i, j) for i in sources}
                sure |= {(row, i, j) for i in sources if len(sources) == 1}
        error = 1 - (len(found & sure) + len(found & possible)) / (len(found) + len(sure))
        scores.append((accurate / linked, error, sum(entropies) / len(entropies)))
    return scores


def test_alignment_scores_equal_their_definitions(make_data):
    data = make_data()
    data.setup("fit")
    dataset = data.datasets["val"]
    split = data.tokenizer.split
    score = AlignmentScores()
    every, shown = [], []
    for rows in torch.arange(len(dataset)).split(13):
        batch = dataset[rows]
        weights = torch.rand(len(rows), 3, batch.target_out.size(1), batch.source.size(1)) ** 3
        weights = weights * (batch.source != PAD)[:, None, None]
        weights = weights / weights.sum(-1, keepdim=True)
        pairs = [dataset.pairs[row] for row in rows.tolist()]
        score.update({"layer": weights}, gold_links(pairs, batch), batch)
        every += [weights[row : row + 1] for row in range(len(rows))]
        shown += pairs
    widest = [torch.nn.functional.pad(w, (0, 48 - w.size(3), 0, 48 - w.size(2))) for w in every]
    expected = scores_by_definition(torch.cat(widest), shown, split)
    ours = score.compute()
    for head, values in enumerate(expected):
        for name, value in zip(("accuracy", "aer", "entropy"), values, strict=True):
            assert ours[f"alignment/layer/head_{head}/{name}"].item() == pytest.approx(value, rel=1e-5)
    assert score.best_head == ("layer", max(range(3), key=lambda head: expected[head][0]))


def scores_of_head(score):
    """Return the scores of the only head, by name."""
    return {name.rpartition("/")[2]: value.item() for name, value in score.compute().items()}


def test_perfect_attention_scores_perfectly():
    tokenizer = SymbolTokenizer("abc")
    pairs = [Pair("abc", "cab", ((2, 0), (0, 1), (1, 2))), Pair("a", "a", ((0, 0),))]
    batch = PairDataset(pairs, tokenizer)[torch.arange(2)]
    gold = gold_links(pairs, batch)
    weights = gold.float()
    weights[..., -1] += weights.sum(-1).eq(0)  # targets without a link attend to EOS
    score = AlignmentScores()
    score.update({"layer": weights.unsqueeze(1)}, gold, batch)
    assert scores_of_head(score) == {"accuracy": 1.0, "aer": 0.0, "entropy": 0.0}
    uniform = AlignmentScores()
    real = (batch.source != PAD)[:, None, None].float().expand(-1, 1, 4, -1)
    uniform.update({"layer": real / real.sum(-1, keepdim=True)}, gold, batch)
    assert scores_of_head(uniform)["entropy"] == pytest.approx((3 * math.log(4) + math.log(2)) / 4)


def test_attending_to_eos_links_with_nothing():
    tokenizer = SymbolTokenizer("ab")
    pairs = [Pair("ab", "a", ((0, 0),))]
    batch = PairDataset(pairs, tokenizer)[torch.arange(1)]
    weights = (batch.source == EOS).float()[:, None, None].expand(-1, 1, 2, -1)
    score = AlignmentScores()
    score.update({"layer": weights}, gold_links(pairs, batch), batch)
    assert scores_of_head(score)["accuracy"] == 0
    assert scores_of_head(score)["aer"] == 1


def linked_characters(pair, digits):
    """Return the source characters that are linked with these digits of the target."""
    links = {digit: {i for i, j in pair.alignment if j == digit} for digit in digits}
    for digit, places in links.items():
        if len(places) == 1:  # numbers are linked digit by digit; the source may omit a leading 0
            (place,) = places
            assert pair.source[place] == pair.target[digit] or pair.target[digit] == "0", pair
    return "".join(pair.source[i] for i in sorted(set().union(*links.values())))


def test_dates_are_aligned_with_the_characters_that_express_them():
    """The characters linked with the digits of day, month and year express these, in every format."""
    kinds = set()
    for pair in DATA["Date"](train_size=2_000).pairs("train"):
        day = date.fromisoformat(pair.target)
        kinds.add(pair.category)

        assert int(linked_characters(pair, (8, 9))) == day.day, pair
        assert linked_characters(pair, (0, 1, 2, 3)) in (f"{day.year}", f"{day.year % 100:02}"), pair
        month = linked_characters(pair, (5, 6))
        names = (calendar.month_name[day.month], calendar.month_abbr[day.month])
        assert month in names or int(month) == day.month, pair
        assert not {j for _, j in pair.alignment} & {4, 7}
    assert len(kinds) == 10


def test_every_generated_pair_has_a_category_and_an_alignment(make_data):
    for pair in make_data().pairs("val"):
        assert pair.category
        assert pair.alignment


def test_source_attention_is_a_distribution_over_real_tokens(network, batch):
    source, target_in = batch
    with attention_maps(network) as maps:
        network(source, target_in)
    over = network.source_attention(maps, source)
    assert over
    for weights in over.values():
        assert weights.shape[2:] == (target_in.size(1), source.size(1))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert weights.masked_select((source == PAD)[:, None, None].expand_as(weights)).eq(0).all()


def test_attention_maps_are_labeled_with_their_tokens(network):
    tokenizer = SymbolTokenizer("abcdefgh")
    pair = Pair("abcd", "ba", ((1, 0), (0, 1)))
    found = attention(network, tokenizer, pair)
    assert any(attention_map.gold for attention_map in found)
    for attention_map in found:
        heads, T, S = attention_map.weights.shape
        assert (len(attention_map.queries), len(attention_map.keys)) == (T, S), attention_map.layer
        for column, row in attention_map.gold:
            assert (attention_map.keys[column], attention_map.queries[row]) in (("b", "b"), ("a", "a"))
        figure = draw_attention(attention_map)
        *panels, bar = figure.axes
        assert len(panels) == heads
        assert bar.get_ylabel() == "weight"
        assert [label.get_text() for label in panels[0].get_yticklabels()] == attention_map.queries
        assert [label.get_text() for label in panels[-1].get_xticklabels()] == attention_map.keys
        assert figure.get_supxlabel() == "attended symbol"
        assert figure.get_supylabel() == (f"{attention_map.predicts} symbol".strip())
        if attention_map.predicts:  # the last row predicts the end
            assert attention_map.queries[-1] == "EOS"
        for panel, weights in zip(panels, attention_map.weights, strict=True):
            assert len(panel.collections[0].get_paths()) == len(attention_map.gold)
            torch.testing.assert_close(torch.tensor(panel.images[0].get_array().data), weights)


@pytest.mark.parametrize("size", [3, 11, 40])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_long_title_fits_into_its_figure(heads, size):
    """Check that the title overlaps neither the panels nor the edges of the figure."""
    sentences = " ".join(["Ein Mann schläft in einem grünen Raum auf einem Sofa."] * 2)
    title = f"example 7: {sentences}\ntrue: {sentences}\npredicted: {sentences}"
    symbols = ["Sofa"] * size
    attention_map = AttentionMap(
        "decoder.0.cross_attention", torch.ones(heads, size, size) / size, symbols, symbols, []
    )
    figure = draw_attention(attention_map, title)
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert box.y1 <= figure.bbox.height
    assert box.y0 >= max(axes.get_tightbbox().y1 for axes in figure.axes)


def test_attention_of_a_wrong_prediction_is_that_of_the_output(network):
    module = Seq2SeqModule(network, SymbolTokenizer("abcdefgh"), 10).eval()
    target = {"source": "abc", "target": "dcba", "alignment": [[0, 3], [1, 2]]}
    for text in ("dcba", "bb"):
        shown = module.attention(target | {"prediction": text})
        expected = module.attention(target | {"target": text})
        for ours, theirs in zip(shown, expected, strict=True):
            torch.testing.assert_close(ours.weights, theirs.weights)
            assert ours.queries == theirs.queries
            assert ours.gold == (theirs.gold if text == "dcba" else [])
            assert (ours.predicts, theirs.predicts) in (("output", "target"), ("", ""))
        assert any(layer.gold for layer in shown) == (text == "dcba")


def test_weights_that_are_drawn_can_still_be_freed_by_fsdp():
    weight = torch.ones(5, 8)
    draw_positions(weight)
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize(("largest", "darkest"), [(1.0, 1.0), (0.5, 1.0), (0.25, 0.25)])
def test_the_darkest_color_is_a_weight_of_1_or_the_largest_of_diffuse_attention(largest, darkest):
    weights = torch.full((2, 3, 8), 0.125)
    weights[1, 2, 3] = largest
    figure = draw_attention(AttentionMap("layers.0.self_attention", weights, list("abc"), list("abcdefgh"), []))
    assert [axes.images[0].get_clim() for axes in figure.axes[:2]] == [(0, darkest)] * 2


@pytest.mark.parametrize(
    ("heads", "size", "columns"), [(1, (9, 9), 1), (2, (9, 9), 2), (4, (9, 9), 2), (2, (5, 40), 1)]
)
def test_heads_are_placed_so_that_labels_stay_legible(heads, size, columns):
    """Place at most two panels in a row, and wide ones below each other; no label reaches the next panel."""
    T, S = size
    symbols = ["a", " ", "Straßenbahn", *"bcdefgh"] * 4
    weights = torch.ones(heads, T, S) / S
    figure = draw_attention(AttentionMap("layers.0.self_attention", weights, symbols[:T], symbols[:S], []))
    figure.draw_without_rendering()
    panels = figure.axes[:-1]
    assert len({panel.get_window_extent().x0 for panel in panels}) == columns
    assert [label.get_text() for label in panels[-1].get_xticklabels()][:3] == ["a", "\N{OPEN BOX}", "Straßenbahn"]
    boxes = [panel.get_tightbbox() for panel in panels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("decoder.1.cross_attention", "decoder1_cross"),
        ("layers.10.self_attention", "layer10_self"),
        ("attention", "attention"),
        ("stack.blocks.0.mix", "stack_block0_mix"),
    ],
)
def test_layers_have_short_names_in_file_names(layer, name):
    assert short_name(layer) == name


def test_cropping_a_long_joint_sequence_keeps_the_target():
    """The rows of the source are cropped instead."""
    tokenizer = SymbolTokenizer("abcdefgh")
    source, target = "abcdefgh" * 7, "hgfedcba"
    pair = Pair(source, target, tuple((7 - i, i) for i in range(8)))
    network = GPT(tokenizer.vocab_size, 16, 2, 1, max_length=80)
    (attention_map,) = attention(network, tokenizer, pair)
    shown = attention_map.cropped()
    assert shown.queries == [*target, "EOS"]
    assert len(shown.gold) == 8
    assert all(shown.keys[column] == shown.queries[row] for column, row in shown.gold)
    assert shown.weights.equal(attention_map.weights[:, -9:, :64])


def test_positions_are_drawn():
    figure = draw_positions(torch.randn(20, 16))
    assert figure.axes[0].images[0].get_array().shape == (16, 20)
    assert len(figure.axes[1].lines) == 4
    assert figure.get_suptitle()


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
    assert "pictures show boxes for 2 characters that no installed font has, such as '\u732b'; install a font" in line
    with pytest.warns(UserWarning, match="another"), missing_glyphs_named():
        warnings.warn("another", UserWarning, stacklevel=1)
