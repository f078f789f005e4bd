"""Data modules, one file per dataset."""

from datamodules.copy import Copy
from datamodules.date import Date
from datamodules.date_world import DateWorld
from datamodules.inflection import Inflection
from datamodules.parallel_text import ParallelText
from datamodules.pronunciation import Pronunciation
from datamodules.sentiment import Sentiment
from datamodules.text import Text
from datamodules.toy_translation import ToyTranslation
from datamodules.tsv import Tsv

__all__ = [
    "Copy",
    "Date",
    "DateWorld",
    "Inflection",
    "ParallelText",
    "Pronunciation",
    "Sentiment",
    "Text",
    "ToyTranslation",
    "Tsv",
]
