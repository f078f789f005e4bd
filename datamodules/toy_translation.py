"""Translation from a toy grammar: 'heute kaufe ich ein kleines Auto' -> 'today i buy a small car .'."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from lightning_tfm.data import GeneratedDataModule, Pair, stable_hash
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import SymbolTokenizer


class Noun(NamedTuple):
    """German noun and its English translation.

    Attributes:
        kind: the kind of noun, which determines the verbs that take it as object.
        gender: "m", "f" or "n".
        german, english: the singular.
        german_plural, english_plural: the plural; empty if the noun is not used in the plural.
    """

    kind: str
    gender: str
    german: str
    german_plural: str
    english: str
    english_plural: str


class Verb(NamedTuple):
    """German verb in the present tense and its English translation.

    Attributes:
        infinitive: the German infinitive.
        forms: the German forms for ich, du, er/sie, wir, ihr, sie.
        english: the English verb.
        english_third: its third person singular.
        kinds: the kinds of noun that the verb takes as object.
    """

    infinitive: str
    forms: tuple[str, ...]
    english: str
    english_third: str
    kinds: tuple[str, ...] = ()


def _nouns(table: str) -> tuple[Noun, ...]:
    rows = (line.split() for line in table.strip().splitlines())
    return tuple(Noun(*(word.strip("-") for word in row)) for row in rows)


NOUNS = _nouns("""
drink  n Bier     -          beer      -
drink  n Cola     -          coke      -
drink  m Kaffee   -          coffee    -
drink  m Tee      -          tea       -
drink  m Wein     -          wine      -
drink  m Saft     -          juice     -
food   m Apfel    Äpfel      apple     apples
food   n Brot     Brote      bread     breads
food   f Suppe    Suppen     soup      soups
food   n Ei       Eier       egg       eggs
food   f Birne    Birnen     pear      pears
food   f Nuss     Nüsse      nut       nuts
text   n Buch     Bücher     book      books
text   m Brief    Briefe     letter    letters
text   f Zeitung  Zeitungen  newspaper newspapers
text   m Roman    Romane     novel     novels
thing  n Auto     Autos      car       cars
thing  n Haus     Häuser     house     houses
thing  m Hund     Hunde      dog       dogs
thing  f Katze    Katzen     cat       cats
thing  m Tisch    Tische     table     tables
thing  m Stuhl    Stühle     chair     chairs
thing  f Tür      Türen      door      doors
thing  f Lampe    Lampen     lamp      lamps
thing  f Blume    Blumen     flower    flowers
thing  n Bild     Bilder     picture   pictures
person m Mann     Männer     man       men
person f Frau     Frauen     woman     women
person n Kind     Kinder     child     children
person m Lehrer   Lehrer     teacher   teachers
person f Ärztin   Ärztinnen  doctor    doctors
person m Sohn     Söhne      son       sons
person f Köchin   Köchinnen  cook      cooks
person n Mädchen  Mädchen    girl      girls
""")


def _verbs(table: str) -> tuple[Verb, ...]:
    """Return verbs from rows of the infinitive, the forms for ich, du, er and ihr, the English verb, and the kinds."""
    verbs = []
    for row in table.strip().splitlines():
        infinitive, forms, english, third, *kinds = re.split(r" {2,}", row)
        i, you, he, you_all = forms.split()
        forms_by_person = (i, you, he, infinitive, you_all, infinitive)
        verbs.append(Verb(infinitive, forms_by_person, english, third, tuple(" ".join(kinds).split())))
    return tuple(verbs)


VERBS = _verbs("""
mögen      mag magst mag mögt                  like      likes      drink food text thing person
kaufen     kaufe kaufst kauft kauft            buy       buys       drink food text thing
sehen      sehe siehst sieht seht              see       sees       drink food text thing person
suchen     suche suchst sucht sucht            look for  looks for  drink food text thing person
brauchen   brauche brauchst braucht braucht    need      needs      drink food text thing
holen      hole holst holt holt                fetch     fetches    drink food text thing person
essen      esse isst isst esst                 eat       eats       food
trinken    trinke trinkst trinkt trinkt        drink     drinks     drink
lesen      lese liest liest lest               read      reads      text
schreiben  schreibe schreibst schreibt schreibt  write   writes     text
malen      male malst malt malt                paint     paints     thing person
""")
(WANT,) = _verbs("möchten  möchte möchtest möchte möchtet  want  wants  drink food text thing")
MODALS = (
    WANT._replace(english="want to", english_third="wants to"),
    *_verbs("""
müssen  muss musst muss müsst      have to  has to
können  kann kannst kann könnt     can      can
sollen  soll sollst soll sollt     should   should
dürfen  darf darfst darf dürft     may      may
"""),
)
AUXILIARIES = ("can", "should", "may")
"""English verbs that are negated without `do`."""

ADJECTIVES = {
    "groß": "big",
    "klein": "small",
    "alt": "old",
    "neu": "new",
    "gut": "good",
    "schön": "beautiful",
    "grün": "green",
    "rot": "red",
    "weiß": "white",
    "gelb": "yellow",
}
ADVERBS = {
    "heute": "today",
    "morgen": "tomorrow",
    "jetzt": "now",
    "oft": "often",
    "hier": "here",
    "abends": "in the evening",
}
THIRD, THEY = 2, 5
"""Third person singular and plural, as indices of `Verb.forms`."""

PRONOUNS = (
    *(("ich", "i", 0), ("du", "you", 1), ("er", "he", THIRD), ("sie", "she", THIRD)),
    *(("wir", "we", 3), ("ihr", "you", 4), ("sie", "they", THEY)),
)
"""German and English pronouns, and their indices of `Verb.forms`."""

DEFINITE = {"nominative": {"m": "der", "f": "die", "n": "das"}, "accusative": {"m": "den", "f": "die", "n": "das"}}
EIN_ENDING = {"nominative": {"m": "", "f": "e", "n": ""}, "accusative": {"m": "en", "f": "e", "n": ""}}
WEAK_ENDING = {"nominative": {"m": "e", "f": "e", "n": "e"}, "accusative": {"m": "en", "f": "e", "n": "e"}}
MIXED_ENDING = {"nominative": {"m": "er", "f": "e", "n": "es"}, "accusative": {"m": "en", "f": "e", "n": "es"}}
"""Endings of an adjective after `der` (weak) and after `ein` (mixed), by case and gender."""

Words = list[tuple[str, str]]
"""Words of one language, each with its meanings as letters; words with a common meaning are aligned."""

LONGEST_GERMAN, LONGEST_ENGLISH = 10, 16


class ToyTranslation(GeneratedDataModule):
    """Data module of German sentences from a toy grammar and their English translations, in a different word order.

    Articles agree with gender and case, and adjectives also with the article; a modal verb moves the infinitive to the
    end; an initial adverb inverts subject and verb; `kein` translates to `not a`, and `nicht` is far from its `not`.
    10% of the sentences are spelled without capitals and umlauts. Every pair has a gold word alignment. 20% of the
    combinations of an adjective and a noun occur only in the test sets.

    Args:
        train_size: number of training pairs.
        val_size: number of validation pairs.
        test_size: number of test pairs.
        max_words: maximum number of words of a German sentence, from 4 to 9; by default, all sentences are used, which
            have up to 10 words. If set, an additional test set "longer" has the sentences with more words.
        longer_size: number of pairs of "longer".
        settings: further arguments of GeneratedDataModule.
    """

    def __init__(
        self,
        train_size: int = 50_000,
        val_size: int = 1_000,
        test_size: int = 5_000,
        max_words: int | None = None,
        longer_size: int = 1_000,
        **settings: Any,
    ) -> None:
        if max_words is not None and not 4 <= max_words < LONGEST_GERMAN:
            raise UserError(
                f"max_words must be at least 4 and less than {LONGEST_GERMAN}, the words of the longest sentences, but "
                f"is {max_words}; try 6"
            )
        self.max_words = max_words
        longer = {} if max_words is None else {"longer": longer_size}
        super().__init__(
            SymbolTokenizer(sorted(_vocabulary()), separator=" "),
            max_source_length=LONGEST_GERMAN + 1,
            max_target_length=LONGEST_ENGLISH + 1,
            sizes={"train": train_size, "val": val_size, "test": test_size} | longer,
            **settings,
        )

    def split_key(self, pair: Pair) -> str:
        return spelled_plainly(pair.source)

    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        draw = random.Random(seed)
        drawn = iter(lambda: _sentence(draw, with_kept_back=split not in ("train", "val")), None)
        for pair in chain(original_sentences(), drawn):
            is_longer = self.max_words is not None and len(pair.source.split()) > self.max_words
            if is_longer == (split == "longer"):
                yield pair


def spelled_plainly(german: str) -> str:
    """Remove capitals and umlauts from a text: 'ich möchte ein Bier' -> 'ich mochte ein bier'."""
    plain: dict[str, str | int | None] = {"ä": "a", "ö": "o", "ü": "u", "ß": "ss"}
    return german.lower().translate(str.maketrans(plain))


def original_sentences() -> list[Pair]:
    """Return the three sentence pairs of the original data, in their original spelling."""
    aligned = ((0, 0), (1, 1), (2, 2), (3, 3))
    return [
        Pair("ich mochte ein bier", "i want a beer .", aligned, "plain"),
        Pair("ich mochte ein cola", "i want a coke .", aligned, "plain"),
        Pair("ich mag das Buch", "i like the book .", aligned, "plain"),
    ]


def held_out(adjective: str, noun: Noun) -> bool:
    """Return whether an adjective and a noun occur together only in the test sets."""
    return stable_hash(f"{adjective} {noun.german}") % 5 == 0


def _noun_phrase(
    draw: random.Random, kinds: tuple[str, ...], case: str, meanings: str, determiner: str, with_kept_back: bool
) -> tuple[Words, Words, bool]:
    """Draw a noun of some kinds with its article and an optional adjective, in a case, "nominative" or "accusative".

    The meanings are the letters of determiner, adjective and noun. The determiner, "der", "ein", "mein" or "kein", is
    not inflected. Combinations held out for the test sets may occur only if `with_kept_back` is set.

    Returns:
        The German words, the English words, and whether the noun is plural.
    """
    of_determiner, of_adjective, of_noun = tuple(meanings)
    noun = draw.choice([noun for noun in NOUNS if noun.kind in kinds])
    plural = noun.german_plural != "" and draw.random() < 0.3
    german: Words = []
    english: Words = []

    if plural:
        article = {"der": "die", "ein": "", "mein": "meine", "kein": "keine"}[determiner]
        ending = "e" if determiner == "ein" else "en"
    elif determiner == "der":
        article, ending = DEFINITE[case][noun.gender], WEAK_ENDING[case][noun.gender]
    else:
        article, ending = determiner + EIN_ENDING[case][noun.gender], MIXED_ENDING[case][noun.gender]
    if article:
        german.append((article, of_determiner + "n" if determiner == "kein" else of_determiner))

    adjective = draw.choice(list(ADJECTIVES)) if draw.random() < 0.5 else None
    if adjective and held_out(adjective, noun) and not with_kept_back:
        adjective = None
    if adjective:
        german.append((adjective + ending, of_adjective))
        english.append((ADJECTIVES[adjective], of_adjective))
    german.append((noun.german_plural if plural else noun.german, of_noun))
    english.append((noun.english_plural if plural else noun.english, of_noun))

    if determiner == "der":
        english.insert(0, ("the", of_determiner))
    elif determiner == "mein":
        english.insert(0, ("my", of_determiner))
    elif not plural:
        english.insert(0, ("an" if english[0][0][0] in "aeiou" else "a", of_determiner))
    return german, english, plural


def _sentence(draw: random.Random, with_kept_back: bool) -> Pair:
    """Draw a sentence and its translation with their word alignment."""
    if draw.random() < 0.6:
        pronoun, english_pronoun, person = draw.choice(PRONOUNS)
        subject: Words = [(pronoun, "s")]
        english_subject: Words = [(english_pronoun, "s")]
    else:
        determiner = draw.choice(("der", "ein", "mein"))
        subject, english_subject, plural = _noun_phrase(
            draw, ("person",), "nominative", "abs", determiner, with_kept_back
        )
        person = THEY if plural else THIRD

    modal = draw.choice(MODALS) if draw.random() < 0.35 else None
    verb = draw.choice(VERBS[1:] if modal else (*VERBS, WANT))  # `mögen` is not combined with a modal verb
    negated = draw.random() < 0.25
    determiner = draw.choice(("der", "ein", "mein"))
    is_definite = determiner != "ein"
    if negated and not is_definite:
        determiner = "kein"
    thing, english_thing, _ = _noun_phrase(draw, verb.kinds, "accusative", "deo", determiner, with_kept_back)

    adverb = draw.choice(list(ADVERBS)) if draw.random() < 0.5 else None
    adverb_in_front = adverb is not None and draw.random() < 0.5
    when: Words = [(adverb, "t")] if adverb else []
    english_when: Words = [(word, "t") for word in ADVERBS[adverb].split()] if adverb else []

    finite: Words = [(modal.forms[person], "m") if modal else (verb.forms[person], "v")]
    german = [*when, *finite, *subject] if adverb_in_front else [*subject, *finite]
    middle = [] if adverb_in_front else when
    german += [*thing, *middle] if is_definite else [*middle, *thing]
    if negated and is_definite:
        german.append(("nicht", "n"))
    if modal:
        german.append((verb.infinitive, "v"))

    first, meaning = (modal, "m") if modal else (verb, "v")
    words: Words = []
    if negated and first.english not in AUXILIARIES:
        words += [("does" if person == THIRD else "do", "n"), ("not", "n")]
        words += [(word, meaning) for word in first.english.split()]
    else:
        words += [(word, meaning) for word in (first.english_third if person == THIRD else first.english).split()]
        words += [("not", "n")] if negated else []
    if modal:
        words += [(word, "v") for word in verb.english.split()]
    english = [*english_subject, *words, *english_thing]
    english = [*english_when, *english] if adverb_in_front else [*english, *english_when]
    english.append((".", ""))

    source = " ".join(word for word, _ in german)
    if draw.random() < 0.1:
        source = spelled_plainly(source)
    alignment = tuple(
        (i, j)
        for i, (_, meanings) in enumerate(german)
        for j, (_, others) in enumerate(english)
        if set(meanings) & set(others)
    )
    traits = {"modal verb": modal, "negated": negated, "adverb in front": adverb_in_front}
    kind = ", ".join(trait for trait, present in traits.items() if present) or "plain"
    return Pair(source, " ".join(word for word, _ in english), alignment, kind)


def _vocabulary() -> set[str]:
    """Return all words of both languages."""
    german = {"nicht", *ADVERBS, *(pronoun for pronoun, *_ in PRONOUNS)}
    german.update(article for by_gender in DEFINITE.values() for article in by_gender.values())
    german.update(stem + ending for stem in ("ein", "mein", "kein") for ending in ("", "e", "en"))
    german.update(stem + ending for stem in ADJECTIVES for ending in ("e", "en", "er", "es"))
    english = {".", "the", "a", "an", "my", "not", "do", "does", *ADJECTIVES.values()}
    english.update(pronoun for _, pronoun, _ in PRONOUNS)
    english.update(word for adverb in ADVERBS.values() for word in adverb.split())
    for noun in NOUNS:
        german |= {noun.german, noun.german_plural} - {""}
        english |= {noun.english, noun.english_plural} - {""}
    for verb in (*VERBS, WANT, *MODALS):
        german |= {verb.infinitive, *verb.forms}
        english.update(word for form in (verb.english, verb.english_third) for word in form.split())
    return german | english | {spelled_plainly(word) for word in german}
