"""Pronunciation of words in ten languages (SIGMORPHON 2021, task 1): 'abbia' -> 'a b b j a'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Literal

from lightning_tfm.data import PairDataModule, Pairs, TableReader
from lightning_tfm.data.download import Download, download
from lightning_tfm.errors import UserError, nearest
from lightning_tfm.tokenization import train_pair_tokenizer

ADDRESS = "https://raw.githubusercontent.com/sigmorphon/2021-task1/821bcdece5a47820872215969f275004b0abe80c/data/"

FILES = {
    f"sigmorphon2021/{name}": Download(f"{ADDRESS}{name}", sha256)
    for name, sha256 in {
        "low/ady_train.tsv": "1a83848ddbe34f7883503bc2e201f6999e695a9dc07fdded04fabe0a445ca881",
        "low/ady_dev.tsv": "66f2b69326269a45c6d4189833822db281afc6ceaf15e275ed693a08513a9421",
        "low/ady_test.tsv": "3f20b99bab05fabc1bbdddce805cf99701b0bf05adfbc84544aae7c8faf48aeb",
        "low/gre_train.tsv": "54523d43c445515c0e06d48e4150f5b40ad30da1a53243256e39d41d018a9ce4",
        "low/gre_dev.tsv": "998f251e717e046b7b24e7b447390ef56dbfc960bc68fcfc86ae24da1743077d",
        "low/gre_test.tsv": "94b7baf85a08f023e03c0fa7542b5b5add8e34005d51563694327100d1652d25",
        "low/ice_train.tsv": "0b2fc9e25ca4282887215f5206f55f753fd3fc79952cfd272db261a25f83ac9f",
        "low/ice_dev.tsv": "50ce56fdb4c244fa6e47cd4e9a14e9833b8d359a7dc92a0200489c5f9d514c17",
        "low/ice_test.tsv": "7ce4b846908bdb80f01ec063ab1ad2175a37ff10092612e011a5427c4dbb6e29",
        "low/ita_train.tsv": "e12573b2f640aa799b5f87ba265a61f62a6212217170aa915875d651a3e0ea1b",
        "low/ita_dev.tsv": "de30becaa09b9121730a07faa80feb08c864405556ab34938d9aaf89f678d521",
        "low/ita_test.tsv": "66f7049496757be938615dddbfd6fd5c846728c477888900fc20bfcc9084bd0c",
        "low/khm_train.tsv": "9b8edb99987d15b36c6105b8f9cb35ae641480ea1bf38905f6ba33847fa2dcbc",
        "low/khm_dev.tsv": "a35bdad9205675bbea8fd222806ae491d2ff539eb76fb9580bc574492135dfe0",
        "low/khm_test.tsv": "85c9d687044911f4cddc5566bebbd5a5d6250d5ebceca8c08605e295dc6102ab",
        "low/lav_train.tsv": "87bf348b77014eb857826065f7727905391bc74f082a1aa7609c42c7c517982e",
        "low/lav_dev.tsv": "f444520b5172d43a4398369936cc8f15c21ee17fa52aadb5521856a91455980b",
        "low/lav_test.tsv": "f5467658f99030747d2667d0d8c7e1379093ab890a1828177b3ef397ee1a8eeb",
        "low/mlt_latn_train.tsv": "1f9469970ae0761d626632c0c6eababd57be7a128baa95cae5e70f7fd15e3467",
        "low/mlt_latn_dev.tsv": "a507b92079a0f52d6e001c5717be200f914a41f7d828875c52a8f477c5d74e67",
        "low/mlt_latn_test.tsv": "133418a88a39c5d06db22338215729297129f96bb5821dd33c18a6fff72b78ca",
        "low/rum_train.tsv": "0cd55921d7ec6aaa79591fcc474d16c2c3df472676d6affa15d18d52c341739f",
        "low/rum_dev.tsv": "ae0dace00c5882dbf5b397dda5b394945a409abff2c1311b0c8b8c7b5bcae76e",
        "low/rum_test.tsv": "0566272004619c8b2f117477c458f45c47033d3e6bfd32b6e3ba0a443ea74e71",
        "low/slv_train.tsv": "d85d5abbdbe5188166a0252b4b8c74fdb534a0ffe81e23b97bb3fb33e962bd61",
        "low/slv_dev.tsv": "f697ae695c71164df293db4ce58e4cc22e80f7ca0aa6d78ae56a9278b256cc3a",
        "low/slv_test.tsv": "669f9fa50d08150bcedfdda008e3b4f6509d687ddf7b83d68ad2826d967f776b",
        "low/wel_sw_train.tsv": "93d76d1747f74434a6b208d0d36e1b7231c6de3f92c9b805ebebf07686f76b5e",
        "low/wel_sw_dev.tsv": "577d7cdf1a6594d23df7c12c2300229f2a86af7e5ef585079d5124d6331a9f60",
        "low/wel_sw_test.tsv": "7f10ff37183f4f828741f043a2cbb2574c0eaf18413d08a48364f5cfbcbe83df",
        "medium/arm_e_train.tsv": "2cfc0ded02151377cb6fa25cae112acb7f3c0d1d92d5479de19799687b0be8d2",
        "medium/arm_e_dev.tsv": "151b26dd407836cbaea4110018a2090e6d627cb98ca5febcfe29bb48bec3bff1",
        "medium/arm_e_test.tsv": "4b2301ef999b9f63d71b05825002a015ef4ce62b1dd56de924c78f237ebb5545",
        "medium/bul_train.tsv": "a0ad49ef705339bf7d7a301cf97cd33a5ab72743b4367914abe42c18ee835170",
        "medium/bul_dev.tsv": "f503124b83dff9ff2f248f39374bf7b8f93a915dafdee6c72f15f7bdf4317d01",
        "medium/bul_test.tsv": "b4a7d382bf94ca5f1b8e5d6c03f567b5837eb5272da67fab8aef1dcfe967450b",
        "medium/dut_train.tsv": "08d327412cbf809a4cf894e015975d91588a38e8e05fb86450f42a4a38e534b8",
        "medium/dut_dev.tsv": "77a896e9510b6ebc610a9bc6a1bf32a06bc85489e9056caf77d996bb107318aa",
        "medium/dut_test.tsv": "eb31a13e8f797f1bda23194689805c8ea0cd6960e86f739d1e818f1815c287ae",
        "medium/fre_train.tsv": "e9de4f5125d2478e50506c5ed278f69d5fb17d8d213f99f845305c24e28a55c2",
        "medium/fre_dev.tsv": "3b42f14f318367dd94faa6d59e8fafabd845a3998800b6ce71a7c67e999490da",
        "medium/fre_test.tsv": "6202c2b7b8d5fbd76a4d40373f9564a9946671dab617438b534bd47c64071c92",
        "medium/geo_train.tsv": "0369d37ddd994ad7366f3c0bfd314d80f2e80f1795c5b461e76344f188944635",
        "medium/geo_dev.tsv": "4a4127d579219a6a7a2079fef950c94543aa022ede1847b753c9e305c1f9e10f",
        "medium/geo_test.tsv": "5f4ac16ace1fdb046ed9dbd99068d0bcfeed278f8c80cb91697ca7ef88c8f2d5",
        "medium/hbs_latn_train.tsv": "b4bf802445c2de3db73e20c2d6c51868e6c66ddb7abc64f5398469cf5c54e9c5",
        "medium/hbs_latn_dev.tsv": "38b3ab21d522b0553e97d62784287cf62e29460360bec8f20b32bbb47b2a7cbc",
        "medium/hbs_latn_test.tsv": "8d0bdc358b35ccaf1cc2068b5304d92a90768c7ac608c2bba8d632e90bfaffd8",
        "medium/hun_train.tsv": "cd6bea5ae552bc73a63abf459af5f41d27c1c276b4a15de49f1fffd23ee4d363",
        "medium/hun_dev.tsv": "a2892c27cf6d3075aacdd195c02bf34f8b509bcc08bb230b758d7978a7d920d0",
        "medium/hun_test.tsv": "e9ec4ba9c89808864e6518e529e21cda6fe51287ad7a5a1fc23668cc64f31159",
        "medium/jpn_hira_train.tsv": "caf113a16654dc778352c8c95867922fb0aa994c484b318f5aea66dc561ea85a",
        "medium/jpn_hira_dev.tsv": "f3f2f36db83b48032767dcf49c536a0e50fa076e48865fa75638262818c4ef70",
        "medium/jpn_hira_test.tsv": "d004af19a5f200303dee48f7399034bcfc1edbd9b750bee8f19f8cb0daf9a7f6",
        "medium/kor_train.tsv": "0623be3d687864b534043585e50b1ac238b7d5564f1e7450b40be3df7329ff7c",
        "medium/kor_dev.tsv": "b1d22601f9b485f9b693dd82d832cb18695edb8a6a6ec6353d16ad729409b839",
        "medium/kor_test.tsv": "341c4691b635f300822f89334d774023702eb64bf3d827562da25862de699ff2",
        "medium/vie_hanoi_train.tsv": "8f2a60af78668db3c2c4d201938a822d7fc7808ffd64b12504723f3ff64fea4c",
        "medium/vie_hanoi_dev.tsv": "5d56e7d14dc4d90758d2d4ba0c74f3531b4e05b5344346786e2a1b1b447093ca",
        "medium/vie_hanoi_test.tsv": "ed555cb71d164b1be52e72b5bd398fe5a787e1a598418498b67dcb1ab6fb439e",
    }.items()
}
"""Files of the low-resource and the medium-resource subtask, from Wiktionary (Ashby et al. 2021)."""

LANGUAGES = {
    level: tuple(
        file.removesuffix("_train.tsv")
        for _, folder, file in (name.split("/") for name in FILES)
        if folder == level and file.endswith("_train.tsv")
    )
    for level in ("low", "medium")
}
"""Codes of the languages by level."""


class Pronunciation(PairDataModule):
    """Data module of words and their pronunciations in ten languages (SIGMORPHON 2021, task 1; Ashby et al. 2021).

    Sources are characters, and targets are phonemes, separated by spaces. The category of a pair is its language. With
    several languages, the language is a feature of the source: an input of a trained model is a word, a tab and the
    code of its language.

    Args:
        level: "low", with 800 training words in each language, or "medium", with 8,000.
        languages: codes of the languages, see `LANGUAGES`; all of the level by default.
        decompose: whether characters are decomposed into letters and marks (Unicode's form NFD), such as Korean
            syllables.
        settings: further arguments of PairDataModule.
    """

    def __init__(
        self,
        level: Literal["low", "medium"] = "low",
        languages: Sequence[str] | None = None,
        decompose: bool = False,
        **settings: Any,
    ) -> None:
        unknown = [language for language in languages or () if language not in LANGUAGES[level]]
        if unknown or languages == []:
            raise UserError(
                f"languages must be of the level {level!r}, but is {unknown[0] if unknown else 'empty'!r}"
                f"{nearest(unknown[0] if unknown else '', LANGUAGES[level])}"
            )
        self.level, self.languages = level, tuple(languages or LANGUAGES[level])
        pairs = self.pairs("train")
        tokenizer = train_pair_tokenizer(
            pairs.sources,
            pairs.targets,
            target_separator=" ",
            feature_separator=";" if len(self.languages) > 1 else None,
            decompose=decompose,
        )
        super().__init__(tokenizer, **settings)

    def pairs(self, split: str) -> Pairs:
        return Pairs(self._parts("dev" if split == "val" else split))

    def _parts(self, split: str) -> Iterator[list[list[str]]]:
        """Yield the sources, targets and categories of each language."""
        table = TableReader({"source": 1, "target": 2}, header=False)
        for language in self.languages:
            name = f"sigmorphon2021/{self.level}/{language}_{split}.tsv"
            for words, targets in table.read(download(name, FILES[name])):
                sources = words if len(self.languages) == 1 else [f"{word}\t{language}" for word in words]
                yield [sources, targets, [*repeat(language, len(words))]]
