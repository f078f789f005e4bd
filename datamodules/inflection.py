"""Inflection in 33 languages (SIGMORPHON 2022, task 0): 'pitypang N;INS;PL' -> 'pitypangokkal'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from lightning_tfm.data import PairDataModule, Pairs, TableReader, partition_by
from lightning_tfm.data.download import Download, download
from lightning_tfm.errors import UserError, nearest
from lightning_tfm.tokenization import train_pair_tokenizer

ADDRESS = (
    "https://raw.githubusercontent.com/sigmorphon/2022InflectionST/e96ceb622317930741913ecf3c31604a00aa44a6/part1/"
)

FILES = {
    f"sigmorphon2022/{name.partition('/')[2]}": Download(f"{ADDRESS}{name}", sha256)
    for name, sha256 in {
        "development_languages/ang_small.train": "dacf9f67dbddd8a387c070a417a733470734ecd164addf0eacf1fe6a25652b68",
        "development_languages/ang.dev": "b35ac99ed1ba5507121ae48a354b3dfe62b81557d2b03cbb4dfcb3a0b2535b2a",
        "development_languages/ang.gold": "669a3372bd48ea0985ef8801d4ed2433b3cf1ef71e8a694b2a8a86b7a1f80e78",
        "development_languages/ara_small.train": "224167741c1785fdcc3dbe8778fcb7e68fbab4380d92c3dcba1f6accc02591e1",
        "development_languages/ara.dev": "2a0198d1cde1a5d467fdf0b8ec64c8b924fdc70a0d7501df63d77f0289efb702",
        "development_languages/ara.gold": "0902e37d18d3a5197a27ed0fcacb743d0642271312cd32be233cb69238ad3cde",
        "development_languages/asm_small.train": "b66f02b8cdc75a6c65df751e7d52985a3285f289f0bf6de2b9c060ee9718e23e",
        "development_languages/asm.dev": "4e100c9541a159e4b1607073cfaf372328b4066fd66fd87d394f2e7636fc8cda",
        "development_languages/asm.gold": "e1c7459ba6258eb181ceeda344ca9b551bbd687b4468261276067e8f1583fb41",
        "development_languages/bra_small.train": "fdb5fa1041791ee34f89fa2ae175cdc72c37ed08039d881ce4ce857aa5016df7",
        "development_languages/bra.dev": "9139cc4c57258099b8515d29a93bafac5f8998f6266c02cfe2ebfab50cc390a2",
        "development_languages/bra.gold": "1a69660a3b38d7d2ddacf537afc283715a3432e583e933f2215f31b6f869f094",
        "development_languages/ckt_small.train": "8d2e3839e42d209a69e1eb504042939f4e19847cd03ac4dcce3a4d3d97b2d0f4",
        "development_languages/ckt.dev": "9781d3860b16d1353ce9ad238eb2d2779a152921458472f7f7132b80ecdd09ea",
        "development_languages/ckt.gold": "deaa6e23598458bf732965039ab73006fc2bc185254736a77614495583617eb7",
        "development_languages/evn_small.train": "d8263ea4689582d285485de5ce1b7d8d8ff437c1eeb25f8e36b8116db5ffd086",
        "development_languages/evn.dev": "648123f04d268ec51f65efbe585841b6674e10ac8005fe9ef972736990206248",
        "development_languages/evn.gold": "0d3a3cc11b32a19e5d08cc7be0a8df8346e4d1d2918d7c4b8d2bd188639683fb",
        "development_languages/gml_small.train": "44c72bf94e4ddafc7a045e17adfc8aba5328adecdfa76ce064753cac5dfb9576",
        "development_languages/gml.dev": "e7a2dafd713e6235dd8a3619e03efe12bf604d5698c050221673b248ec142aae",
        "development_languages/gml.gold": "394b3df3e547c1ca1c4ad77ac93c96e9c3a429d34ec7f8918dc58de15d0e6651",
        "development_languages/goh_small.train": "748d7fecec7fda3dc6a6e59add0837afbca5befb2209c78511d22f50712407ae",
        "development_languages/goh.dev": "a71e1c6ad3abd93be81d2e17e1233b1d3b7915c7f27c56e2f030a6cfa3ea988b",
        "development_languages/goh.gold": "3d74fc37aee0b90ad5aaf10bd6fadcd718bf20dcca8b6df91f2dce9b01b6d1ff",
        "development_languages/got_small.train": "6dafb22adab2ee9bcd3a31cf1d567a2bd23b494ea9432bcfae008505abb25e20",
        "development_languages/got.dev": "8230d31da0727e57d3aeaf0c3fa03ea8c2eba018bb563f52ade90f89698291b8",
        "development_languages/got.gold": "5b72f039bec61894bb5f9f68e55f57c44b7007afa82e7d91229cd7e07697d497",
        "development_languages/guj_small.train": "adbd93ac9a362c05fe537d511d570ba27e9c5824a30cdac2c7b6cbcaf66d68a2",
        "development_languages/guj.dev": "016a49e3ece618ae655e7cd967c41eeeae033617b75b018748adadb1c7a377fb",
        "development_languages/guj.gold": "bf58418bbc6db28aad5910c89592647c2b82bfad38f5bde5094a55b616d34b30",
        "development_languages/heb_small.train": "9353db741aaf79f9b9363a93ec343bc74de94785757f8ecb6cfa0f9df8da1f53",
        "development_languages/heb.dev": "2dfe25210e7cc6a74b2f0fab3d3b5b82296c87e0eaf62fcebbe53015434d9bf5",
        "development_languages/heb.gold": "2ec77401dc10b3126762d97d5d5dfe8fc09d5275c01710c2c19503606398231a",
        "development_languages/hsb_small.train": "b1727a565433a5f863f916b5b9414408cc73d5d3a3fa2383c19957d5a6185e00",
        "development_languages/hsb.dev": "79ea76775a5bc27cc44b54ba800bc706c2ee25c20bbc97b1c462c15a6c4886c2",
        "development_languages/hsb.gold": "2c43e671f9bdf3f257c7ef5d16e3d346c93e49803e8f599b4d38b14d9b5a78d2",
        "development_languages/hsi_small.train": "42debbb1800128530c57ae147f692766456daf75af2780d35579778e93f557a0",
        "development_languages/hsi.dev": "e330304713bbbffcc80483c420a52c3a9323df36b0b62de07078fd500513e5d3",
        "development_languages/hsi.gold": "29701d46fee357129fb4ce32b200b972b0638e24124e3ea15b688ca6893b736d",
        "development_languages/hun_small.train": "97df77b29f5fcf7bc63fed15f1dd5c0e9b4b5c50b4531caa533f0043ab802a54",
        "development_languages/hun.dev": "dbde0314902392750d288dfa49587024dca8a73b4e3e28e915bfe941312cacc8",
        "development_languages/hun.gold": "7d08ba7c2029c3af2ffcdef069b87ff9c57f0fde64485fa5b16a56e6aec2dff1",
        "development_languages/itl_small.train": "661e9e012f3a4f6e03594ec392a481aa05c48f63f3ed0cae64710e97916945d6",
        "development_languages/itl.dev": "cfc39ab8e49c487e441dc3f5eb04fe9cca8d271289eb7abe1c8f8fd38eb8ef04",
        "development_languages/itl.gold": "f637de53ead93218556b3fd085e7a68accdca9000989a5c0948dd0b5437e3dd7",
        "development_languages/kat_small.train": "4a6fa20e74c1e62e660252ab5d98473beea263b1189efab8b7802f4f0673d833",
        "development_languages/kat.dev": "b26b5e2b3488392810602633974d4a0eb56e43a992965b37fd8632606047f47d",
        "development_languages/kat.gold": "5e86e89f33c641b1a0c3b35978e19cc0049b55df0324d5003034fa34e9fbe769",
        "development_languages/ket_small.train": "65c0ab12f5aff8ceb82de790c576c2938750fe8542ced98fd6ae1a86bbbe25dd",
        "development_languages/ket.dev": "ec64b1ebbd3e618099a0fd30a1333c3b41b9aa99b2514fe458e54f55c033ebeb",
        "development_languages/ket.gold": "07ccc06787d5dfd992562988059761d82e49ed74369169162c40b9438fc835be",
        "development_languages/khk_small.train": "0d98381d5a61ac39b1895af54e55425d967f701c39ffd11eef5b1d1660f8594c",
        "development_languages/khk.dev": "e910d0ea4c541f4c7942a061eda977c4f1014d32886d043fbbd9d778733bc735",
        "development_languages/khk.gold": "7045978ad1d75e500706645bcd501b6ac6c65b13ad0efe5fed712daf49a57f22",
        "development_languages/kor_small.train": "abc50b95363f205d394fdeacdb4fb84972c1402edb97c2db462029f4c62eccd3",
        "development_languages/kor.dev": "9e77917a10d7289aa91e1696064a27f88e5cda6f138e5b20e2893603cb0cd1b6",
        "development_languages/kor.gold": "a0d4bfaf0070fd2a38b1f72873c85197617038fccbb0f95aa340ef9671268cba",
        "development_languages/krl_small.train": "6f53d058d88e6cbbf484ee2063b4102c36293eaf1d47d53e4f1d459e6a77f12f",
        "development_languages/krl.dev": "e5e95119b17502b3b97ef19c55b7e6f49bd7a7292244160555946fa121023037",
        "development_languages/krl.gold": "db3128d66d49d58459823cbec66bf9a478c70b3849281671400f433d0e674979",
        "development_languages/lud_small.train": "3de24b0f109575c6ad2dc73ce10fba54e5e44815f157fa6161f39d28456d3158",
        "development_languages/lud.dev": "ad9819f822f2e7e23b15bc7c495abfab72c00fa25d7ed604aba9021ab7836ce2",
        "development_languages/lud.gold": "f2285c6fc7663ef7f3c2a945ca72f8a1265237baa49eddea99f1a6f619e3b49b",
        "development_languages/mag_small.train": "7552bcf763dcf37d998c7290954ee41b2ef7ad67046b905f7506d97a95681b78",
        "development_languages/mag.dev": "d2581a3e4fdf1a62d3c37b1c1613a0ec4a820698e587bf80aa7ec9e8830804e2",
        "development_languages/mag.gold": "ae47e477c0989a46876c5a70c4b47f3181f512ac4b8ff45e649addac5aa09ba3",
        "development_languages/nds_small.train": "fcbb96267f294ab85bd267862a96a5817ca9030916bfc0fbcebde0038c01fc54",
        "development_languages/nds.dev": "40e9c140a98daa66105008f370dfb76fb69bbb983c867c0c3d4c0ddd162584ba",
        "development_languages/nds.gold": "591af40baeac486373c0524b786cd8ce2f94d02c01cf856f358bd497f2a57402",
        "development_languages/non_small.train": "e6e628e9fbde1af81ed45aaf3f6fa561cac3c26c34d28c26a77d279771753dd6",
        "development_languages/non.dev": "b1a541490a0495b230f590757edc59837499d11c02d1461c3bfd2db2c3f10546",
        "development_languages/non.gold": "eb595b12cad1562943744a8614167a8a4b59ab2305878c2210e827a9dd07a8b9",
        "development_languages/pol_small.train": "068df396cff9d8ddf11018e799870d4d5335e35e4f4ab2190c0282c0e2fcf8ce",
        "development_languages/pol.dev": "664ecdd8298f3fa07d318937ad073ae9840edcdd52d30ee79f28d8cdc5ff97de",
        "development_languages/pol.gold": "1805e2b0353b35d67082acb13d9783a8fba9ccffff2ccdd10a6d8fcee0d06879",
        "development_languages/poma_small.train": "24ee1b2e6140d7482ad0564ba409015e118c32a8ae7dc2719ae460e1ca0b4906",
        "development_languages/poma.dev": "29831dd439de648d7ee4ed9b7aa74fdc1ea22d0e0af199e3af6b58d366fbcb29",
        "development_languages/poma.gold": "84d51070c14287844297fe9b1a6fece3d2899ca598739637d082777a79080271",
        "development_languages/sjo_small.train": "8a7a02794ba99da97a5e8ace8f55d856585d85bd8676b81e8d704c12b5dffd7d",
        "development_languages/sjo.dev": "04f690451f493dc37969b2394e2eaa109037c4110f0dd26551816840d33addfe",
        "development_languages/sjo.gold": "b21e9ea596b575c641f24254c5c750b3027e87e2fdf819af5e40d9bdbfa1d0b6",
        "development_languages/slk_small.train": "cbdb5ee923af8739cfe21053b793476e6903f2bb667c32dd58919972461de675",
        "development_languages/slk.dev": "ce50048c4d3175de23149f08a6bb6d01b17d87b21ec9d8f7f9a6bb6e40d7e6fe",
        "development_languages/slk.gold": "3c71ed2b31e0b57b12854686c94ffa24e610bfc79fa602596738c6d50b354878",
        "development_languages/tur_small.train": "a0c5d9b56dcf5cbf58ae8f25f7a53cde027c1220392b6918180f013b3b62ec35",
        "development_languages/tur.dev": "527d484b781a5b10f4e6bed2f9397e4c80b11b1c259650a36cd78c8b1706fc5e",
        "development_languages/tur.gold": "483f6ae92b808827734ead5be07369bdf00e679d65b4f3b6c05935db9f9166c2",
        "development_languages/vep_small.train": "4816998187d7f40b83b4eb353ac93c52663dab956a858438f01a2da1d4d38c76",
        "development_languages/vep.dev": "45324ae7f3bed249c332235a1af7ecb3e222aa93a7eba9578e244d71f681a28e",
        "development_languages/vep.gold": "b44b6e563049542beb6a246cdf457d45bc69b89b9f1577adc87519605b5031da",
        "surprise_languages/hye_small.train": "ecd41d1f8a398a09da142b4d89eab1f10ff43cf1d294747f41e8f2a8a661726e",
        "surprise_languages/hye.dev": "0af9d996127da55829f4f87bcbb4a0a8bef4cd96ae3c16d966805346920e753f",
        "surprise_languages/hye.gold": "a9bce26dc1fbee8cbac8ba1971302f960651727b2d725f24c4996825ca2ad34a",
        "surprise_languages/kaz_small.train": "5fd690e4220a62510cabe31a1a7ed090ce836638e2ec299dfaf475a119315b86",
        "surprise_languages/kaz.dev": "ce8ac6978fe6844cfd037f8ab96622894ed572d5f85f2ca2fde1967d6ae40ba0",
        "surprise_languages/kaz.gold": "c42ec770d1e6d71992e26a6a72257dce5b69aad35f5544b3ae1b75a476c8986e",
        "surprise_languages/slp_small.train": "93e1440693184426efbe76de092a3f0a53f26382e171d6bbb4d6ae9adc2cecbe",
        "surprise_languages/slp.dev": "695cb9edc9d5ea46d52eaaaa196a929a0bf2f6603e6fad816a70f24b8118bf1b",
        "surprise_languages/slp.gold": "761e8b01e395c4c9715865044cb199a80aef90fc9a7dcddf12e99f482eb8ef27",
    }.items()
}
"""Files of part 1 with the small training tables, from UniMorph (Kodner et al. 2022); the test targets are `.gold`."""

ENDINGS = {"train": "_small.train", "val": ".dev", "test": ".gold"}
"""Endings of the names of files by split."""

LANGUAGES = tuple(
    name.removeprefix("sigmorphon2022/").removesuffix(ENDINGS["train"]) for name in FILES if name.endswith("train")
)
"""Codes of the languages: first the development languages, then the three surprise languages."""


class Inflection(PairDataModule):
    """Data module of inflected forms in 33 languages (SIGMORPHON 2022, task 0, part 1; Kodner et al. 2022).

    A source consists of the characters of a lemma and the features of the form, and a target of the characters of the
    form. The category of a pair is its language. With several languages, the language is the last feature: an input of
    a trained model is a lemma, a tab and features, such as `N;INS;PL;hun`.

    Training uses the small tables of the task, which hold 700 forms of most languages, and fewer of those with little
    data.

    Note:
        The published small table of Kazakh is the same as its large one, of 7,000 forms. The overall accuracy of the
        task is the exact match over all test pairs, not its mean over languages.

    Args:
        languages: codes of the languages, see `LANGUAGES`; all by default.
        decompose: whether characters are decomposed into letters and marks (Unicode's form NFD), such as Korean
            syllables.
        partition: whether the category of a validation or test pair is not its language, but what of it occurs in the
            training table of its language: "both" its lemma and its features, only the "lemma", only the "features",
            or "neither", as in `Tsv`.
        settings: further arguments of PairDataModule.
    """

    def __init__(
        self,
        languages: Sequence[str] | None = None,
        decompose: bool = False,
        partition: bool = False,
        **settings: Any,
    ) -> None:
        unknown = [language for language in languages or () if language not in LANGUAGES]
        if unknown or languages == []:
            raise UserError(
                f"languages must be of SIGMORPHON 2022, but is {unknown[0] if unknown else 'empty'!r}"
                f"{nearest(unknown[0] if unknown else '', LANGUAGES)}"
            )
        self.languages, self.partition = tuple(languages or LANGUAGES), partition
        pairs = self.pairs("train")
        tokenizer = train_pair_tokenizer(pairs.sources, pairs.targets, feature_separator=";", decompose=decompose)
        super().__init__(tokenizer, **settings)

    def pairs(self, split: str) -> Pairs:
        return Pairs(self._parts(split))

    def _parts(self, split: str) -> Iterator[list[list[str]]]:
        """Yield the sources, targets and categories of each language."""
        partitioned = self.partition and split != "train"
        for language in self.languages:
            train = (sources for sources, _ in self._sides(language, "train"))
            name = partition_by(chain.from_iterable(train)) if partitioned else None
            for sources, forms in self._sides(language, split):
                yield [sources, forms, [*map(name, sources)] if name else [language] * len(forms)]

    def _sides(self, language: str, split: str) -> Iterator[list[list[str]]]:
        """Yield the sources and targets of a language."""
        table = TableReader({"source": 1, "target": 2, "features": 3}, header=False)
        name = f"sigmorphon2022/{language}{ENDINGS[split]}"
        feature = f";{language}" if len(self.languages) > 1 else ""
        for lemmas, forms, features in table.read(download(name, FILES[name])):
            yield [[f"{lemma}\t{tags}{feature}" for lemma, tags in zip(lemmas, features, strict=True)], forms]
