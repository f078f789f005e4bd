"""Tables: columns, headers, separators and blank lines."""

from __future__ import annotations

import pytest
import torch

from datamodules import ParallelText, Sentiment, Tsv
from datamodules.parallel_text import read_pairs
from datamodules.sentiment import read_labeled
from lightning_tfm.data import Pair
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Seq2SeqPredictor
from lightning_tfm.networks import AttentionLSTM
from lightning_tfm.system import memory
from lightning_tfm.tokenization import EOS, NUM_SPECIAL, PAD, UNKNOWN, tokenizer_from_dict
from support.corpora import LABEL_AND_TEXT, PARALLEL, reviews, texts_in, write_lines
from support.data import set_up


def test_targets_are_split_at_their_separator(tmp_path):
    table = write_lines(tmp_path / "train.tsv", ["cat\tK AE T", "hat\tHH AE T", "tee\tT IY"])
    data = set_up(Tsv(table, table, target_separator=" ", batch_size=2))
    tokenizer = tokenizer_from_dict(data.tokenizer.to_dict())
    assert tokenizer.split("cat") == ["c", "a", "t"]
    assert tokenizer.split_target("K AE T") == ["K", "AE", "T"]
    assert tokenizer.decode(tokenizer.encode_target("HH AE T")) == "HH AE T"
    assert len(tokenizer.encode("cat")) == len(tokenizer.encode_target("K AE T")) == 3
    assert tokenizer.symbols[0] == UNKNOWN
    assert set(tokenizer.symbols[1:]) == set("cathe") | {"K", "AE", "T", "HH", "IY"}
    assert tokenizer.encode("ox") == [NUM_SPECIAL, NUM_SPECIAL]
    batch = data.datasets["train"][torch.tensor([0, 2])]
    assert batch.target_out.tolist()[1][2:] == [EOS, PAD]


def test_targets_are_normalized_to_decodable_text(tmp_path):
    """Whitespace between symbols becomes one space, as in predictions, which could not match otherwise."""
    table = write_lines(tmp_path / "table.tsv", ["cat\tK  AE \u00a0T", "hat\tHH AE T"])
    words = write_lines(tmp_path / "words.tsv", ["ein  Hund\ta  dog", "der Hund\tthe dog"])
    for data in (Tsv(table, table, target_separator=" "), ParallelText([words], [words], tokenizer="word")):
        for pair in data.pairs("train"):
            assert data.tokenizer.decode(data.tokenizer.encode_target(pair.target)) == pair.target


def test_features_are_read_from_their_own_column(tmp_path):
    lines = ["run\tran\tV;PST", "see\tseen\tV;V.PTCP;PST", "V\tV\tN", "go\twent\tV;; PST"]
    train = write_lines(tmp_path / "train.tsv", lines)
    data = set_up(Tsv(train, train, features=3, batch_size=2))
    pairs = data.datasets["train"].pairs
    assert pairs[0][:2] == ("run\tV;PST", "ran")
    assert data.tokenizer.split("run\tV;PST") == ["r", "u", "n", "[V]", "[PST]"]
    assert data.tokenizer.split("run") == ["r", "u", "n"]
    assert data.tokenizer.split(pairs[3].source) == ["g", "o", "[V]", "[PST]"]
    features = {"[V]", "[PST]", "[V.PTCP]", "[N]"}
    assert {symbol for symbol in data.tokenizer.symbols if len(symbol) > 1} == features
    network = AttentionLSTM.from_data(data, d_model=8, features_encoder="linear")
    assert {data.tokenizer.symbols[id - NUM_SPECIAL] for id in network.hyper_parameters["feature_ids"]} == features
    assert AttentionLSTM.data_settings(Tsv(train, train)).keys() == {"vocab_size"}
    network = AttentionLSTM.from_data(data, d_model=8, outputs="targets")
    targets = {symbol for pair in data.pairs("train") for symbol in pair.target}
    assert {data.tokenizer.symbols[id - NUM_SPECIAL] for id in network.hyper_parameters["target_ids"]} == targets
    assert AttentionLSTM.from_data(data, d_model=8).hyper_parameters["target_ids"] is None
    few = Tsv(train, train, features=3, vocab_size=8)
    assert few.tokenizer.unknown_id in few.target_ids, "rare symbols of targets are the unknown one"
    ids = data.datasets["train"].sources[torch.tensor([0])][0, :-1].tolist()
    assert tokenizer_from_dict(data.tokenizer.to_dict()).encode("run\tV;PST") == ids
    assert Tsv(train, train, source=2, target=1).pairs("train")[0][:2] == ("ran", "run")
    table = write_lines(tmp_path / "t.tsv", ["word\tclass\tplural", "cat\tN\tcats"])
    assert Tsv(table, table, features="class").pairs("train")[0][:2] == ("cat\tN", "cats")


@pytest.mark.parametrize("has_features", [False, True])
@pytest.mark.parametrize("separator", ["", " ", "-"])
def test_several_sources_are_joined_with_a_symbol_between_them(separator, has_features, tmp_path):
    """The ids are those of the symbols of each column, and of a separator that no symbol of a column equals."""
    rows = [(["a", "b", "a"], ["c"], ["V", "PST"]), (["a"], ["b", "a", "c"], ["N"]), (["c", "c"], ["a"], ["V"])]
    lines = [f"{separator.join(word)}\tx\t{separator.join(lemma)}\t{';'.join(tags)}" for word, lemma, tags in rows]
    table = write_lines(tmp_path / "table.tsv", lines)
    data = set_up(Tsv(table, table, source=(3, 1), features=4 if has_features else None, target=2,
                      source_separator=separator, batch_size=2))  # fmt: skip
    tokenizer = tokenizer_from_dict(data.tokenizer.to_dict())
    assert "\t" in tokenizer.symbols
    for (word, lemma, tags), pair in zip(rows, data.datasets["train"].pairs, strict=True):
        columns = [separator.join(lemma), separator.join(word), *([";".join(tags)] if has_features else [])]
        assert pair[:2] == ("\t".join(columns), "x")
        features = [f"[{tag}]" for tag in tags] if has_features else []
        assert tokenizer.split(pair.source) == [*lemma, "\t", *word, *features]
        assert [tokenizer.symbols[id - NUM_SPECIAL] for id in tokenizer.encode(pair.source)] == [
            *lemma, "\t", *word, *features
        ]  # fmt: skip
    sources = data.datasets["train"].sources[torch.arange(3)]
    assert [row[row >= NUM_SPECIAL].tolist() for row in sources] == [*map(tokenizer.encode, data.sources("train"))]
    predictor = Seq2SeqPredictor(AttentionLSTM.from_data(data, d_model=8), tokenizer, data.max_target_length)
    assert [predictor.encode_line(source) for source in data.sources("val")] == [
        ([*tokenizer.encode(source), EOS], "") for source in data.sources("val")
    ]


def test_columns_of_several_sources_have_names_and_partitions(tmp_path):
    train = write_lines(tmp_path / "train.tsv", ["text\tleft\tout\ttag", "a\tb\tx\tN", "a\tc\tx\tV"])
    val = write_lines(tmp_path / "val.tsv", ["text\tleft\tout\ttag", "a\tb\tx\tV", "b\ta\tx\tA"])
    columns = {"source": ["left", "text"], "target": "out", "features": "tag"}
    data = Tsv(train, val, **columns, partition=True)
    assert [pair.source for pair in data.pairs("train")] == ["b\ta\tN", "c\ta\tV"]
    assert [pair.category for pair in data.pairs("val")] == ["both", "neither"]
    assert [pair[:2] for pair in Tsv(train, val, source=["text"], target=3).pairs("train")] == [("a", "x")] * 2
    alone, listed = (Tsv(train, val, source=source, target="out").tokenizer for source in ("text", ["text"]))
    assert alone.fingerprint == listed.fingerprint, "one column in a list is that column"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "source must be at least one column, but is empty; set it to a column, such as 1"),
        ([1, 4], "source 2 must be a column of .*, from 1 to 3, but is 4"),
        ([1, "lemma"], "source 2 must be a column of .*, which has a, b, c, but is 'lemma'"),
        ([1, 2], "each line must hold a source 2, but column 2 of line 2 of .* is empty"),
    ],
)
def test_columns_of_several_sources_must_hold_text(source, message, tmp_path):
    table = write_lines(tmp_path / "table.tsv", ["a\tb\tc", "a\t \tc"])
    with pytest.raises(UserError, match=message):
        Tsv(table, table, source=source, target=3)


@pytest.mark.parametrize(("separator", "longest"), [("", 7), (" ", 4)])
@pytest.mark.parametrize("place", range(3))
def test_outputs_are_at_most_as_long_as_the_longest_target_of_all_tables(separator, longest, place, tmp_path):
    """The end of the sequence is a token, too."""
    tables = [write_lines(tmp_path / f"{n}.tsv", ["a" * 70 + "\tb a"] * 2) for n in range(3)]
    tables[place] = write_lines(tmp_path / "long.tsv", ["a\tb", "a\tbb a b", "a\tb"])
    data = Tsv(*tables, target_separator=separator, max_source_length=71, batch_size=2)
    assert data.max_target_length == longest
    set_up(data)  # no target is too long
    assert Tsv(*tables, target_separator=separator, max_target_length=9).max_target_length == 9


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("run\tran\tV;ARG(1;SG)", {"features": 3}),  # as in UniMorph
        ("run\tV;ARG(1;SG)\tran", {"features": 2}),
        ("ran\trun\tV;ARG(1;SG)", {"features": 3, "source": 2}),
        ("run\tV+ARG(1+SG)\tran", {"features": 2, "feature_separator": "+"}),
        ("run\tV  ARG(1 SG)\tran", {"features": 2, "feature_separator": " "}),
    ],
)
def test_tables_of_inflections_have_features_in_any_column_with_any_separator(line, settings, tmp_path, capsys):
    """Parentheses are part of the symbols."""
    table = write_lines(tmp_path / "t.tsv", [line, line])
    data = Tsv(table, table, **settings)
    source, target, *_ = data.pairs("train")[0]
    assert data.tokenizer.split(source) == ["r", "u", "n", "[V]", "[ARG(1]", "[SG)]"]
    assert target == "ran"
    assert "feature_separator" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("features", "separator", "told"),
    [
        (["V+PST", "V+PRS", "N"], ";", "+"),
        (["V PST", "N PL"], ";", " "),
        (["V, PST", "N, PL"], ";", ","),
        (["V;PST", "N;PL", "V"], "+", ";"),
        (["N+A", "N", "V", "N"], ";", None),
        (["V;PST", "V+PST", "V+PRS"], ";", None),
        (["V", "N"], ";", None),
    ],
)
def test_a_message_names_another_feature_separator(features, separator, told, tmp_path, capsys):
    table = write_lines(tmp_path / "t.tsv", [f"a\tb\t{text}" for text in features])
    Tsv(table, table, features=3, feature_separator=separator)
    message = f"such as {features[0]!r}, which is one symbol; set feature_separator to {told!r}\n"
    assert (message in capsys.readouterr().err) is (told is not None)


def test_a_missing_table_names_its_setting(tmp_path):
    table = write_lines(tmp_path / "table.tsv", ["a\tb"])
    for split, files in (("train", ["none", table]), ("val", [table, "none"]), ("test", [table, table, "none"])):
        message = f"{split} must be a file, but there is no file 'none'; set it to yours, as with --data.{split} FILE"
        with pytest.raises(UserError, match=message):
            Tsv(*files)


@pytest.mark.parametrize(
    ("settings", "is_told"), [({}, True), ({"source": 1, "target": 2}, False), ({"features": 3}, False)]
)
def test_unused_columns_are_named_unless_all_are_set(settings, is_told, tmp_path, capsys):
    (tmp_path / "table.tsv").write_text("run\tran\tV;PST\nsee\tsaw\tV;PST\n")
    Tsv(*[str(tmp_path / "table.tsv")] * 2, batch_size=1, **settings)
    told = f"of the 3 columns of {tmp_path / 'table.tsv'}, only source (1), target (2) are used"
    assert (told in capsys.readouterr().err) == is_told


def test_categories_are_read_from_any_column(tmp_path):
    lines = ["run\tran\tV;PST", "cat\tcats\tN;PL", "go\twent\tV;PST"]
    table = write_lines(tmp_path / "table.tsv", lines)
    categories = ["V;PST", "N;PL", "V;PST"]
    for settings, sources in (({}, ["run", "cat", "go"]), ({"features": 3}, ["run", "cat", "go"])):
        pairs = set_up(Tsv(table, table, category=3, batch_size=2, **settings)).datasets["val"].pairs
        assert [pair.category for pair in pairs] == [pairs[row].category for row in range(3)] == categories
        assert [pair.source.partition("\t")[0] for pair in pairs] == sources
        assert pairs.subset(torch.tensor([True, False, True]))[1].category == "V;PST"
    named = write_lines(tmp_path / "named.tsv", ["kind\tword\tplural", "N\tcat\tcats"])
    assert Tsv(named, named, category="kind").pairs("train")[0] == Pair("cat", "cats", category="N")
    with pytest.raises(UserError, match=r"category must be a column of .*, from 1 to 3, but is 4"):
        Tsv(table, table, category=4)
    with pytest.raises(UserError, match=r"each line must hold a category, but column 3 of line 2 of .* is empty"):
        Tsv(table, write_lines(tmp_path / "empty.tsv", [lines[0], "cat\tcats\t "]), category=3)


def test_partitions_are_those_of_sigmorphon_2022(tmp_path):
    """Compare with the example of the shared task, in which "eat" and "V;PST" both occur, though not together."""
    train = write_lines(tmp_path / "train.tsv", ["eat\teating\tV;PRG", "run\tran\tV;PST"])
    lines = ["eat\tate\tV;PST", "run\trun\tV;NFIN", "sleep\tslept\tV;PST", "go\tgoes\tV;PRS;3;SG"]
    new = write_lines(tmp_path / "new.tsv", lines)
    data = set_up(Tsv(train, new, features=3, partition=True, batch_size=2))
    assert [pair.category for pair in data.datasets["val"].pairs] == ["both", "lemma", "features", "neither"]
    plain = set_up(Tsv(train, new, features=3, batch_size=2))
    assert data.fingerprint == plain.fingerprint, "the texts are the same"
    tested = Tsv(train, train, new, features=3, partition=True)
    assert {pair.category for pair in tested.pairs("val")} == {"both"}
    assert [pair.category for pair in tested.pairs("test")] == ["both", "lemma", "features", "neither"]


def test_unknown_symbols_of_validation_and_test_are_reported(tmp_path, capsys):
    """Symbols that `vocab_size` excludes from the training data are not reported, which may be many."""
    train = write_lines(tmp_path / "train.tsv", ["ab\tab\tN", "ba\tba\tV"])
    val = write_lines(tmp_path / "val.tsv", ["axx\tb\tN", "ay\tb\tA", "a\tz\tN"])
    set_up(Tsv(train, val, train, features=3, batch_size=2))
    assert [line for line in capsys.readouterr().err.splitlines() if "vocabulary" in line] == [
        "lightning-tfm: 4 symbols in 2 of 3 sources of val are not in the vocabulary: 'x', 'y', '[A]'",
        "lightning-tfm: 1 symbols in 1 of 3 targets of val are not in the vocabulary: 'z', "
        "which only a pointer-generator can predict",
    ]


@pytest.mark.parametrize(
    ("name", "lines", "settings"),
    [
        ("words.tsv", ["source\ttarget", "ab\tAB", "c\tC"], {}),
        ("words.tsv", ["german\tenglish", "ab\tAB", "c\tC"], {"header": True}),
        ("words.tsv", ["number\tgerman\tenglish", "1\tab\tAB", "2\tc\tC"], {"source": "german", "target": "english"}),
        ("words.csv.gz", ['"ab",AB', "c,C"], {}),
        ("words.csv", ["Source,Target", '"ab","AB"', "c,C"], {}),
        ("words.CSV", ["id;Lemma;Form", '1;"ab";AB', "2;c;C"], {}),
        ("words.csv", ["ab;AB", "c;C"], {}),
        ("words.tsv", ["target\tsource", "ab\tAB", "c\tC"], {"source": 1}),
        ("words.tsv", ["word\tkey", "AB\tab", "C\tc"], {"target": "word"}),
        ("words.tsv", ["target\tsource", "AB\tab", "C\tc"], {}),
        ("words.tsv", ["AB\tab", "C\tc"], {"source": 2}),
        ("words.tsv", ["ab\tN\tAB", "c\tV\tC"], {"target": 3}),
    ],
)
def test_tables_have_headers_and_may_be_csv(name, lines, settings, tmp_path):
    table = write_lines(tmp_path / name, lines)
    data = Tsv(table, table, **settings)
    assert [pair[:2] for pair in data.pairs("train")] == [("ab", "AB"), ("c", "C")]


def test_fields_of_csv_may_be_long_and_contain_commas_and_line_feeds(tmp_path):
    table = write_lines(tmp_path / "reviews.csv", ["label,text", 'pos,"good, really"', 'neg,"bad\nthough"'])
    texts = [("good, really", "pos"), ("bad though", "neg")]
    assert [pair[:2] for pair in read_labeled([table], LABEL_AND_TEXT, "test")["test"]] == texts
    # the header says that the label is the target
    assert [*read_pairs([table], PARALLEL, "test")] == [[*map(list, zip(*texts, strict=True))]]
    table = write_lines(tmp_path / "words.csv", [f"{'ab' * 100_000},AB"])  # above the limit of the csv module
    assert [*read_pairs([table], PARALLEL, "test")] == [[["ab" * 100_000], ["AB"]]]


LABELED = [f"{number % 2}\ta {('bad', 'good')[number % 2]} film {number}" for number in range(20)]
PRONOUNCED = [f"{letter}{letter.lower()}\t{letter} AH {letter}" for letter in "ABCDEFGHIJ"]
TAGGED = [f"{letter}{letter.lower()}\t{letter}\t{'NV'[place % 2]}" for place, letter in enumerate("ABCDEFGHIJ" * 2)]
ALONE = [f"{letter}\t{letter.lower()}" for letter in "ABCDEFGHIJKL"]


@pytest.mark.parametrize(
    ("first", "lines", "is_header"),
    [
        ("label\tquote", LABELED, True),
        ("Star rating\tbody of it", LABELED, True),  # above numbers
        ("name\tsound", PRONOUNCED, True),  # above several words
        ("name\tnext\tkind", TAGGED, True),  # above texts that repeat
        ("name\tother", ALONE, False),
        ("name\tsound", PRONOUNCED[:9], False),  # too few rows
        ("Zz\tZ AH Z", PRONOUNCED, False),
        ("Zz\tZ\tN", TAGGED, False),
        ("2\ta meh film", LABELED, False),
        ("B\tExcellent", [f"{'AB'[number % 2]}\tan image of {number}" for number in range(20)], False),
        ("one million\t1,000,000", [f"a {number}\t{number}" for number in range(10)], False),
        ("half\t1/2", [f"a {number}\t{number}" for number in range(10)], False),
    ],
)
def test_a_first_line_unlike_the_others_is_a_header(first, lines, is_header, tmp_path, capsys):
    table = write_lines(tmp_path / "table.tsv", [first, *lines])
    assert len(Tsv(table, table).pairs("train")) == len(lines) + (not is_header)
    message = f"names its columns: {first.replace(chr(9), ', ')}; set header to false"
    assert (message in capsys.readouterr().err) is is_header
    for header in (True, False):
        assert len(Tsv(table, table, header=header).pairs("train")) == len(lines) + (not header)


def test_long_names_of_columns_are_shortened_in_messages(tmp_path, capsys):
    first = f"{'a' * 1_000}\tb"
    table = write_lines(tmp_path / "table.tsv", [first, *PRONOUNCED])
    with pytest.raises(UserError) as error:
        Tsv(table, table, source="word", header=True)
    Tsv(table, table)
    for message in (str(error.value), capsys.readouterr().err):
        assert f"{'a' * 40}, b" in message
        assert "a" * 41 not in message


@pytest.mark.parametrize("read", [Tsv, ParallelText, Sentiment])
def test_a_header_of_the_training_table_is_one_in_each_split(read, tmp_path):
    """A header above few rows cannot be told from data by itself."""
    train, val = (write_lines(tmp_path / f"{n}.tsv", ["kind\tquote", *LABELED[:n]]) for n in (20, 4))
    settings = {"test_fraction": 0.3} if read is Sentiment else {}
    assert len(read(train, val, **settings).pairs("val")) == 4


def test_decimal_commas_do_not_separate_fields(tmp_path):
    for row, pair in (("{0},5;n{0}", ("1,5", "n1")), ("{0},5", ("1", "5"))):
        table = write_lines(tmp_path / "t.csv", map(row.format, range(5)))
        assert Tsv(table, table).pairs("train")[1][:2] == pair


@pytest.mark.parametrize(
    ("header", "order", "settings"),
    [
        ("id;text;label", "{0};{2};{1}", {}),
        (";stars;review", "{0};{1};{2}", {}),
        ("kind;quote;page", "{1};{2};{0}", {"label": "kind", "text": 2}),
        (None, "{0};{2};{1}", {"label": 3, "text": 2}),
    ],
)
def test_labels_and_texts_may_be_any_columns(header, order, settings, tmp_path):
    rows = [order.format(number, *row) for number, row in enumerate(reviews())]
    table = write_lines(tmp_path / "t.csv", [header, *rows] if header else rows)
    assert texts_in(Sentiment(table, **settings)) == sorted(reviews())


@pytest.mark.parametrize("place", [0, 3, 5])
def test_blank_lines_are_skipped_and_counted(place, tmp_path, capsys):
    for number, (name, separator, blank) in enumerate(
        (("t.tsv", "\t", "\t "), ("t.tsv", "\t", ""), ("t.csv", ",", ","), ("t.csv", ",", ""))
    ):
        rows = [f"a{number}{row}{separator}b" for row in range(5)]
        table = write_lines(tmp_path / name, [*rows[:place], blank, blank, *rows[place:]])
        assert [pair.source for pair in Tsv(table, table).pairs("train")] == [row[:3] for row in rows]
        assert f"2 blank lines of {table} are skipped, the first in line {place + 1}\n" in capsys.readouterr().err
    texts = [f"good {number}" for number in range(5)]
    good = write_lines(tmp_path / "a.pos", [*texts[:place], " ", *texts[place:]])
    bad = write_lines(tmp_path / "a.neg", ["bad"] * 5)
    pairs = [*(Pair(text, "pos") for text in texts), *[Pair("bad", "neg")] * 5]
    assert [*read_labeled([good, bad], LABEL_AND_TEXT, "test")["test"]] == pairs
    assert f"1 blank lines of {good} are skipped, the first in line {place + 1}\n" in capsys.readouterr().err


def test_texts_of_the_same_tokens_count_as_overlaps(tmp_path, capsys):
    train = [write_lines(tmp_path / "t.tsv", ["pos\tA good film!", "neg\tbad", "neg\tso so"])]
    others = [write_lines(tmp_path / "x.tsv", ["pos\ta Good film !", "pos\tgood", "neg\tBAD", "neg\tunknown"])]
    Sentiment(train, others, others, val_fraction=0, test_fraction=0, batch_size=2).setup("fit")
    assert "2 of 4 texts of test also occur in train" in capsys.readouterr().err
    table, other = (write_lines(tmp_path / f"{n}.tsv", [f"a  b\tc\t{f}"]) for n, f in enumerate(("V;PST", "V; PST")))
    Tsv(table, other, features=3, source_separator=" ", batch_size=1).setup("fit")
    assert "1 of 1 sources of val also occur in train" in capsys.readouterr().err


@pytest.mark.parametrize("part", [1, 3, memory.PART])
def test_tables_do_not_depend_on_the_number_of_rows_read_at_a_time(part, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PART", part)
    lines = [f"a {number}\tb  {number}\tV;PST" for number in range(7)]
    table = write_lines(tmp_path / "table.tsv", lines)
    data = set_up(Tsv(table, table, features=3, target_separator=" ", max_source_length=8))
    assert [*data.datasets["train"].pairs] == [Pair(f"a {number}\tV;PST", f"b {number}") for number in range(7)]
    assert data.tokenizer.symbols[1:6] == (" ", "[PST]", "[V]", "a", "b")
    for line, message in (("a 5\t \tV", "column 2 of line 6 of .* is empty"), ("a 5", "line 6 has 0")):
        broken = write_lines(tmp_path / "broken.tsv", [*lines[:5], line, *lines[5:]])
        with pytest.raises(UserError, match=message):
            Tsv(broken, table, features=3)
