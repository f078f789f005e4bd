"""`lightning-tfm methods`: describe runs in a paragraph for a publication, with references.

The paragraph contains only what the files of the runs say: each phrase belongs to a setting that is not off, and each
number is a setting, or recorded in the summary or the provenance. Phrases are in LaTeX; # stands for the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.comparison import Group, find_groups
from lightning_tfm.errors import UserError, escape_controls, rank_zero_print
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import relative
from lightning_tfm.system.tables import breakable_latex, escape_latex

REFERENCES = Path(__file__).parents[1] / "reporting/references.bib"
"""References of the phrases, by key in alphabetical order."""

NETWORKS = {
    "AttentionLSTM": "a recurrent encoder-decoder",
    "EncoderClassifier": r"a Transformer encoder \cite{vaswani2017} that classifies the mean of its encoded tokens",
    "GPT": r"a decoder-only Transformer \cite{radford2019}",
    "LinearTransformer": r"a decoder-only Transformer with linear attention \cite{katharopoulos2020}",
    "MaskedEncoder": r"a Transformer encoder \cite{devlin2019}",
    "Transformer": r"an encoder-decoder Transformer \cite{vaswani2017}",
}
"""Networks of this package."""

FIXED = {
    "EncoderClassifier": ["learned positional embeddings"],
    "LinearTransformer": [r"tied embeddings \cite{press2017}"],
    "MaskedEncoder": ["learned positional embeddings", r"tied embeddings \cite{press2017}"],
}
"""Parts that a network always has, without a setting."""

SETTINGS = {
    "num_layers": "# layers",
    "Transformer.num_layers": "# layers in each of the encoder and the decoder",
    "d_model": "a width of #",
    "d_embedding": "embeddings of width #",
    "num_heads": "# attention heads",
    "num_kv_heads": r"# key-value heads \cite{ainslie2023}",
    "d_head": "heads of width #",
    "d_ff": "feed-forward networks of width #",
    "d_classifier": "a hidden layer of width # before the output",
    "dropout": r"dropout \cite{srivastava2014} of #",
    "word_dropout": r"word dropout \cite{iyyer2015} of #",
    "num_bigram_buckets": "a naive Bayes classifier with # bigram ids, averaged with the network",
    "max_length": "a maximum length of # tokens",
    "window": r"attention to a sliding window of # tokens \cite{beltagy2020}",
    "rotary_base": "a base of # of the rotary encodings",
    "norm_eps": "an epsilon of # of the norms",
    "logit_cap": r"logits capped at # \cite{gemma2024}",
    "lora_rank": r"low-rank adaptation \cite{hu2022} of rank #, with all other weights frozen",
}
"""Phrases of the settings of a network that are numbers."""

USUAL = {"rotary_base": 10000, "norm_eps": 1e-5}
"""Values of these settings that have no phrase."""

CHOICES: dict[str, dict[object, str]] = {
    "activation": {
        "gelu": r"GELU activations \cite{hendrycks2016}",
        "gelu_tanh": r"GELU activations \cite{hendrycks2016} in their tanh approximation",
        "relu": "ReLU activations",
        "relu_squared": r"squared ReLU activations \cite{so2021}",
        "swiglu": r"SwiGLU activations \cite{shazeer2020}",
    },
    "attention": {
        "additive": r"additive attention \cite{bahdanau2015}",
        "location_aware": r"location-aware attention \cite{chorowski2015}",
        "monotonic": r"monotonic attention \cite{raffel2017}",
        "hard_monotonic": r"hard monotonic attention \cite{wu2019}",
    },
    "bias": {False: "no biases in linear layers and layer norms"},
    "cell": {"lstm": r"LSTM cells \cite{hochreiter1997}", "gru": r"GRU cells \cite{cho2014}"},
    "cross_attention": {"monotonic": r"monotonic cross-attention \cite{raffel2017}"},
    "naive_bayes_weight": {},  # it has a value without naive Bayes, too
    "features_encoder": {"linear": "features whose embeddings are added to that of each token"},
    "norm": {"pre": r"pre-norm \cite{xiong2020}", "post": "post-norm"},
    "norm_type": {"rms": r"RMSNorm \cite{zhang2019}"},
    "pointer_generator": {True: r"a pointer-generator output \cite{see2017}"},
    "positions": {
        "alibi": r"linear attention biases (ALiBi) \cite{press2022}",
        "coupled": r"coupled \cite{cho2024}, randomized \cite{ruoss2023} rotary positional encodings \cite{su2021}",
        "learned": "learned positional embeddings",
        "none": r"no positional encodings \cite{kazemnejad2023}",
        "randomized": r"randomized \cite{ruoss2023} rotary positional encodings \cite{su2021}",
        "rotary": r"rotary positional encodings \cite{su2021}",
        "sinusoidal": r"sinusoidal positional encodings \cite{vaswani2017}",
    },
    "qk_norm": {True: r"normalized queries and keys \cite{henry2020}"},
    "text_only": {},
    "tie_embeddings": {True: r"tied embeddings \cite{press2017}"},
}
"""Phrases of the settings of a network with few values; other values have none."""

DATA = {
    "Copy": "sequences of numbers to copy",
    "Date": "dates as people write them and in ISO format, drawn by Faker and formatted by Babel",
    "DateWorld": "dates in many languages, formatted by Babel with variations, and in ISO format",
    "ToyTranslation": "German sentences from a toy grammar and their English translations",
}
"""Data that this project generates."""

DATASETS = {
    "aclImdb_v1.tar.gz": r"film reviews of the Internet Movie Database \cite{maas2011}",
    "multi30k/": r"image descriptions of Multi30k \cite{elliott2016}",
    "polarity/": r"sentences of film reviews \cite{pang2005}",
    "tiny_shakespeare": r"the plays of tiny Shakespeare \cite{karpathy2015}",
}
"""Data that this project downloads, by the beginning of the names of their files."""

FILES = ("train", "val", "test", "path")
"""Settings of data that name files."""

TOKENIZERS = {
    "character": "into characters",
    "subword": r"into subwords by byte-pair encoding \cite{sennrich2016}",
    "word": "into words",
}
"""Tokenizers of data modules of this project."""

EXAMPLES = {
    "Classifier": "texts",
    "LanguageModel": "windows",
    "MaskedLanguageModel": "windows",
    "Seq2SeqModule": "pairs",
}
"""Names of the examples of a task."""

NOT_DESCRIBED = ("batch_size", "batch_tokens", "eval_batch_size", "num_workers", "seed", "tokenizer", "tokenizer_file")
"""Settings of data that are described elsewhere or do not change the results."""

OPTIMIZERS = {
    "AdamW": r"AdamW \cite{loshchilov2019}",
    "Muon": r"Muon \cite{jordan2024} for hidden matrices and AdamW \cite{loshchilov2019} for all other parameters",
}
"""Optimizers of this package and of torch."""

RATES = {
    "lr": "a peak learning rate of #",
    "muon_lr": "a peak learning rate of # for hidden matrices",
    "betas": r"$\beta$ of #",
    "momentum": "a momentum of #",
    "weight_decay": "a weight decay of #",
}
"""Phrases of the settings of an optimizer."""

DECAYS = {
    "cosine": "decayed to zero by half a cosine",
    "inverse_sqrt": r"decayed with the inverse square root of the step \cite{vaswani2017}",
    "linear": "decayed linearly to zero",
    "one_cycle": r"followed a one-cycle schedule \cite{smith2018}",
}
"""Phrases of the learning rate schedules."""

SCORES = {"bleu": r"BLEU \cite{papineni2002}", "chrf": r"chrF \cite{popovic2015}"}
"""Scores of sacrebleu."""

PACKAGES = {"torch": r"PyTorch \cite{paszke2019}", "lightning": r"Lightning \cite{falcon2019}"}
"""Packages whose versions are always named."""


def methods(arguments: list[str]) -> int:
    """Print a paragraph for each group of runs, and the references of all paragraphs."""
    groups, notes = find_groups(make_parser().parse_args(arguments).groups)
    described = []
    for group in groups:
        trained = [run for run in group.runs if run.summary.train_seconds is not None and run.starts]
        for run in group.runs:
            if run not in trained:
                notes.append(f"{relative(run.folder)} has no record of a training, and is left out")
        if trained:
            described.append(Group(group.name, tuple(sorted(trained, key=lambda run: run.summary.seed))))
    for note in notes:
        rank_zero_print(note)
    if not described:
        raise UserError("GROUP must name a run that was trained, but names tests only; try runs/NAME/version_0")
    paragraphs = [" ".join(sentences(group)) for group in described]
    for group, paragraph in zip(described, paragraphs, strict=True):
        print(f"% {escape_controls(' '.join(group.name.split()))}\n{escape_controls(paragraph)}\n")
    print(references(paragraphs), end="")
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm methods",
        description="Describe finished runs in a paragraph of LaTeX, with its references in BibTeX: model, data, "
        "optimizer, schedule, seeds, hardware and versions. Runs with equal settings except for the seed share one.",
    )
    parser.add_argument(
        "groups",
        metavar="GROUP",
        nargs="+",
        help="an experiment, a run, a folder of runs, a quoted pattern such as 'date_*', or NAME=RUNS[,RUNS]",
    )
    return parser


def references(paragraphs: Iterable[str]) -> str:
    """Return the entries of BibTeX that paragraphs cite, in alphabetical order of their keys."""
    cited = {key for paragraph in paragraphs for key in re.findall(r"\\cite\{(\w+)\}", paragraph)}
    entries = re.findall(r"^(@\w+\{(\w+),\n.*?^\}\n)", REFERENCES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(entry for entry, key in entries if key in cited)


def sentences(group: Group) -> list[str]:
    """Return what the runs of a group were, in sentences of LaTeX.

    Raises:
        UserError: if the settings of the runs, except for the seed, are not equal or not complete.
    """
    first = group.runs[0]
    if any(run.settings != first.settings for run in group.runs):
        raise UserError(
            f"the runs of a group must have equal settings except for the seed, but those of {group.name} differ; "
            "leave out the name of the group"
        )
    try:
        model, data, trainer = (first.config[name] for name in ("model", "data", "trainer"))
        described = [
            _network(model, first),
            *_task(model),
            *_data(data, model, group),
            *_optimization(model, data, trainer),
            *_training(trainer, first.config, group),
            *_evaluation(model, first),
            *_environment(data, model, trainer, group),
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(first.folder / Run.CONFIG)!r} must hold all settings, as fit writes it, but does not: {error!r}; "
            "restore a copy"
        ) from None
    return described


def _network(model: Mapping[str, Any], run: Run) -> str:
    name, settings = _class(model["init_args"]["network"])
    kind = NETWORKS.get(name, f"the network {_code(name)}")
    phrases = [_phrase(name, key, value) for key, value in settings.items()]
    parts = _joined([*filter(None, phrases), *FIXED.get(name, [])])
    return f"We trained {kind}{' with ' if parts else ''}{parts}; it has {run.summary.parameters:,} parameters."


def _phrase(network: str, name: str, value: object) -> str:
    """Return the phrase of a setting of a network; empty if it is off."""
    is_known = network in NETWORKS  # the settings of other networks may have another meaning
    if is_known and name in CHOICES:
        return CHOICES[name].get(value, "")
    if not value or value == USUAL.get(name):
        return ""
    template = SETTINGS.get(f"{network}.{name}", SETTINGS.get(name))
    if template is None or not is_known:
        return f"{_code(name)} {_value(value)}"
    singular = template.replace("# layers", "# layer").replace(" heads", " head")
    return (singular if value == 1 else template).replace("#", _value(value))


def _task(model: Mapping[str, Any]) -> list[str]:
    name, settings = _class(model)
    found = []
    if pretrained := settings.get("pretrained"):
        found.append(f"Training started from the pretrained weights in {_code(pretrained)}.")
    if name == "MaskedLanguageModel":
        share = _value(settings["mask_fraction"])
        found.append(rf"A fraction of {share} of the tokens was masked as in BERT \cite{{devlin2019}}.")
    if smoothing := settings.get("label_smoothing"):
        found.append(rf"The loss used label smoothing \cite{{szegedy2016}} of {_value(smoothing)}.")
    return found


def _data(data: Mapping[str, Any], model: Mapping[str, Any], group: Group) -> list[str]:
    name, settings = _class(data)
    starts = [run.starts[0] for run in group.runs]
    files = {split: _listed(settings[split]) for split in FILES if settings.get(split)}
    names = [file for each in files.values() for file in each]
    known = next((text for begin, text in DATASETS.items() if all(file.startswith(begin) for file in names)), None)
    what = DATA.get(name) or (known if names else None) or f"{'read by' if names else 'those of'} {_code(name)}"
    found = [f"The data were {what}."]
    if names:
        found.append(f"Files: {'; '.join(f'{split}: {_joined(map(_code, each))}' for split, each in files.items())}.")
    sizes = starts[0].get("data_sizes", {})
    if sizes:
        splits = _joined(f"{number:,} ({escape_latex(split)})" for split, number in sizes.items())
        found.append(f"The splits had {splits} {EXAMPLES.get(_class(model)[0], 'examples')}.")
    skipped = (*FILES, *NOT_DESCRIBED, *(["vocab_size"] if "tokenizer" in settings else []))
    others = [
        f"{_code(key)} {_value(value)}"
        for key, value in settings.items()
        if value and key not in skipped and not (sizes and key.endswith("_size"))
    ]
    if others:
        found.append(f"Settings of the data: {'; '.join(others)}.")
    tokenizer = str(settings.get("tokenizer"))
    if file := settings.get("tokenizer_file"):
        found.append(f"Texts were tokenized as defined by {_code(file)}.")
    elif tokenizer in TOKENIZERS:
        most = f", at most {_value(settings['vocab_size'])} of them" if settings.get("vocab_size") else ""
        found.append(f"Texts were tokenized {TOKENIZERS[tokenizer]}{most}.")
    prints = [start["data_fingerprint"] for start in starts]
    if all(each == prints[0] for each in prints):
        listed = _joined(f"{_code(value)} ({escape_latex(split)})" for split, value in prints[0].items())
        found.append(f"The fingerprints of the splits were {listed}.")
    return found


def _optimization(model: Mapping[str, Any], data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[str]:
    settings, data_settings = model["init_args"], data["init_args"]
    name, rates = _class(settings["optimizer"])
    phrases = [RATES.get(key, f"{_code(key)} #").replace("#", _value(value)) for key, value in rates.items() if value]
    found = [f"We used {OPTIMIZERS.get(name, _code(name))} with {_joined(phrases)}."]
    schedule = settings["lr_schedule"]
    warmup, decay = schedule["warmup_steps"], DECAYS[schedule["decay"]]
    if warmup >= trainer["max_steps"]:
        decay = f"increased until the end, in a warm-up of {_value(warmup)} steps"
        decay += ", and did not reach its peak" if warmup > trainer["max_steps"] else ""
    elif warmup and schedule["decay"] == "one_cycle":
        decay += f" with a warm-up of {_value(warmup)} steps"
    elif warmup:
        decay = f"increased linearly over {_value(warmup)} steps, and then {decay}"
    found.append(f"The learning rate {decay}.")
    if tokens := data_settings.get("batch_tokens"):
        batch = f"Each batch had at most {_value(tokens)} tokens on its longer side"
    else:
        batch = f"Each batch had {_value(data_settings['batch_size'])} examples"
    if (accumulated := trainer["accumulate_grad_batches"]) > 1:
        batch += f", and each step used {_value(accumulated)} batches"
    found.append(f"{batch}.")
    if limit := trainer["gradient_clip_val"]:
        what = "Each element" if trainer["gradient_clip_algorithm"] == "value" else "The norm"
        found.append(f"{what} of the gradient was clipped at {_value(limit)}.")
    return found


def _training(trainer: Mapping[str, Any], config: Mapping[str, Any], group: Group) -> list[str]:
    summaries = [run.summary for run in group.runs]
    seeds = sorted({summary.seed for summary in summaries})
    steps = _span([summary.steps for summary in summaries])
    noun = "the seed" if len(seeds) == 1 else "each of the seeds"
    found = [f"We trained for {steps} steps with {noun} {_joined(map(str, seeds))}."]
    for reason in dict.fromkeys(summary.stopped_early for summary in summaries if summary.stopped_early):
        is_planned = config["model"]["init_args"]["lr_schedule"]["decay"] != "inverse_sqrt"
        planned = ", for which the learning rate was scheduled," if is_planned else ""
        found.append(
            f"Training of at most {_value(trainer['max_steps'])} steps{planned} was stopped early by a {reason}."
        )
    for callback in trainer["callbacks"] or ():
        name, settings = _class(callback)
        if name == "WeightAveraging":
            decay = _value(settings["decay"])
            found.append(f"The weights were averaged exponentially with a decay rate of at most {decay}.")
        else:
            found.append(f"The callback {_code(name)} was used.")
    changed = sorted({name for run in group.runs for start in run.starts for name in start["changed_settings"]})
    if changed:
        found.append(f"Settings were changed when a run was resumed: {_joined(map(_code, changed))}.")
    if begun := sorted({start["checkpoint"] for run in group.runs for start in run.starts[:1] if start["checkpoint"]}):
        found.append(f"Training started from {_joined(map(_code, begun))}.")
    interval = trainer["val_check_interval"]
    every = f", validated every {_value(interval)} batches," if interval else ""
    monitor = config["checkpoint"]["monitor"]
    if monitor:
        split = {"val": "validation"}.get(summaries[0].split, summaries[0].split)
        found.append(f"The checkpoint with the best {_code(monitor)}{every} was evaluated on the {split} split.")
    return found


def _evaluation(model: Mapping[str, Any], run: Run) -> list[str]:
    settings, found = model["init_args"], []
    if beams := settings.get("beam_size"):
        found.append("Decoding was greedy." if beams == 1 else f"Decoding used a beam search with {beams} beams.")
    for name, signature in run.summary.signatures.items():
        found.append(
            rf"{SCORES.get(name, _code(name))} is computed by sacrebleu \cite{{post2018}} ({_code(signature)})."
        )
    return found


def _environment(
    data: Mapping[str, Any], model: Mapping[str, Any], trainer: Mapping[str, Any], group: Group
) -> list[str]:
    starts = [start for run in group.runs for start in run.starts]
    precision = str(trainer["precision"] or "")
    mixed = r" \cite{micikevicius2018}" if precision.endswith("-mixed") else ""
    found = [f"The precision was {_code(precision)}{mixed}."] if precision else []
    machines = []
    for start in starts:
        hardware, processes = start["hardware"], start["processes"]
        where = escape_latex(hardware["processor"])
        if hardware["gpus"] and trainer["accelerator"] != "cpu":
            where = _joined(map(escape_latex, dict.fromkeys(hardware["gpus"])))
        several = f"{processes} processes" if processes > 1 else "one process"
        threads = hardware["threads"]
        machines.append(f"{several} with {threads} thread{'s' if threads > 1 else ''} on {where}")
    seconds = [run.summary.train_seconds for run in group.runs if run.summary.train_seconds is not None]
    found.append(f"Training took {_span(seconds)} seconds per run in {_joined(dict.fromkeys(machines))}.")
    if isinstance(strategy := trainer["strategy"], dict):
        name, settings = _class(strategy)
        found.append(
            f"The strategy was {_code(name)} with {_joined(f'{_code(k)} {_value(v)}' for k, v in settings.items())}."
        )
    names = {"python": "Python", **PACKAGES}
    generated = _class(data)[0]
    names |= {"faker": "Faker"} if generated == "Date" else {}
    names |= {"babel": "Babel"} if generated in ("Date", "DateWorld") else {}
    if data["init_args"].get("tokenizer") == "subword" or data["init_args"].get("tokenizer_file"):
        names |= {"tokenizers": "tokenizers"}
    if group.runs[0].summary.signatures:
        names |= {"sacrebleu": "sacrebleu"}
    recorded = [start["versions"] for start in starts]
    software = [
        f"{text} {_joined(dict.fromkeys(escape_latex(versions[name]) for versions in recorded))}"
        for name, text in names.items()
        if all(name in versions for versions in recorded)
    ]
    own = dict.fromkeys(f"{start['versions']['lightning_tfm']}{_commit(start['framework'])}" for start in starts)
    software.append(rf"lightning\_tfm \cite{{lightning_tfm}} {_joined(own)}")
    found.append(f"We used {_joined(software)}.")
    return found


def _commit(framework: Mapping[str, Any]) -> str:
    """Return the commit of the framework; empty for an installed package."""
    if not framework["commit"]:
        return ""
    return f" (commit {framework['commit'][:10]}{' with uncommitted changes' if framework['dirty'] else ''})"


def _class(setting: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a class, which is a path unless this project or torch defines it, and its arguments."""
    path = setting["class_path"]
    is_known = path.startswith(("lightning_tfm.", "datamodules.", "torch.optim.")) or "." not in path
    return path.rpartition(".")[2] if is_known else path, setting.get("init_args") or {}


def _listed(value: str | Sequence[str] | Mapping[str, float]) -> list[str]:
    if isinstance(value, Mapping):  # of the texts of a mixture to their weights
        return [f"{name}: {weight}" for name, weight in value.items()]
    return [value] if isinstance(value, str) else [*value]


def _value(value: object) -> str:
    """Return a setting in LaTeX, with commas between thousands from 10,000 on."""
    if isinstance(value, list | tuple):
        return _joined(map(_value, value))
    return f"{value:,}" if type(value) is int and value >= 10_000 else escape_latex(str(value))  # 1970 is a year


def _code(name: str) -> str:
    return rf"\texttt{{{breakable_latex(name)}}}"


def _span(values: Sequence[float]) -> str:
    """Return a number, or the smallest and the largest of several."""
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def _joined(parts: Iterable[str]) -> str:
    """Return parts in a sentence, such as "a, b and c"."""
    *others, last = [*parts] or [""]
    return f"{', '.join(others)} and {last}" if others else last
