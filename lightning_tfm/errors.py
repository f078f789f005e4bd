"""Errors, messages on standard error, and signals that end a command."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from tqdm import tqdm

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that end a command, before which training saves.

SIGHUP, of a closed terminal, and SIGUSR1, of SLURM before a time limit, are not defined on Windows.
"""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line feed."""


class UserError(ValueError):
    """Error that the user can fix. The message names the setting, the rule, the value and a fix, in one line."""


class DamagedError(UserError):
    """Error of a file that is not as lightning_tfm has written it."""


SYNONYMS = {
    # Settings of `fit`
    "ckpt_path": "checkpoint_path load load_checkpoint resume resume_from resume_from_checkpoint",
    "seed_everything": "random_seed random_state seed",
    "checkpoint.every_n_train_steps": "checkpoint_every save_every save_interval save_steps",
    "checkpoint.keep_last": "keep keep_last save_total_limit",
    "checkpoint.monitor": "metric metric_for_best_model monitor",
    "data": "data_dir data_path dataset datamodule",
    "data.batch_size": "b batch batch_size batchsize bs per_device_train_batch_size train_batch_size",
    "data.feature_separator": "feature_separator features_sep",
    "data.features": "features features_col features_column",
    "data.max_source_length": "max_source_length",
    "data.max_target_length": "max_target_length",
    "data.num_workers": "dataloader_num_workers num_workers workers",
    "data.source": "source_col source_column",
    "data.source_separator": "source_sep source_separator",
    "data.target": "target_col target_column",
    "data.target_separator": "target_sep target_separator",
    "data.train": "train_data train_file train_path",
    "data.val": "dev dev_data dev_file dev_path val_data val_file val_path valid_file validation_file",
    "model.label_smoothing": "label_smoothing label_smoothing_factor",
    "model.lr_schedule": "lr_schedule lr_scheduler lr_scheduler_type schedule scheduler",
    "model.lr_schedule.warmup_steps": "num_warmup_steps warmup warmup_steps warmup_updates",
    "model.network": "arch architecture net network",
    "model.network.d_ff": "d_ff dim_feedforward ffn_dim intermediate_size",
    "model.network.d_head": "d_head d_kv head_dim",
    "model.network.d_model": "d_model dim embed_dim embedding_size hidden hidden_dim hidden_size n_embd width",
    "model.network.dropout": "drop dropout",
    "model.network.num_heads": "attention_heads heads n_head n_heads nhead num_attention_heads num_heads",
    "model.network.num_kv_heads": "n_kv_heads num_key_value_heads num_kv_heads num_query_groups",
    "model.network.num_layers": "depth encoder_layers layers n_layer n_layers num_hidden_layers num_layers",
    "model.network.rotary_base": "rope_base rope_theta rotary_base",
    "model.network.tie_embeddings": "tie_embeddings tie_word_embeddings weight_tying",
    "model.network.window": "sliding_window window window_size",
    "model.optimizer": "optim optimizer",
    "model.optimizer.lr": "learning_rate lr max_lr",
    "model.optimizer.weight_decay": "wd weight_decay",
    "name": "exp_name experiment experiment_name model_dir run_name",
    "trainer.accelerator": "accelerator cpu cuda device gpu no_cuda use_cpu",
    "trainer.accumulate_grad_batches": "accumulate_grad_batches grad_accum gradient_accumulation_steps update_freq",
    "trainer.callbacks": "callback callbacks early_stopping patience",
    "trainer.devices": "devices gpus n_gpus ngpus nproc_per_node num_devices num_gpus world_size",
    "trainer.gradient_clip_val": "clip clip_norm grad_clip gradient_clip gradient_clip_val max_grad_norm",
    "trainer.log_every_n_steps": "log_every log_interval logging_steps",
    "trainer.logger": "log_dir logdir logger no_wandb out_dir output_dir save_dir tensorboard use_wandb wandb",
    "trainer.max_epochs": "e epoch epochs max_epoch max_epochs n_epochs num_epochs num_train_epochs",
    "trainer.max_steps": "iterations max_iters max_steps max_update num_steps num_train_steps steps total_steps",
    "trainer.max_time": "max_time time_limit",
    "trainer.num_nodes": "nnodes nodes num_nodes",
    "trainer.precision": "amp bf16 dtype fp16 half mixed_precision precision",
    "trainer.strategy": "ddp deepspeed fsdp strategy",
    "trainer.val_check_interval": "eval_every eval_interval eval_steps val_every val_interval validate_every",
    # Options of the other commands
    "beam-size": "beam beam_width beams num_beams",
    "input": "file infile input_file source text",
    "int8": "load_in_8bit quantize",
    "max-tokens": "length max_len max_length max_new_tokens",
    "n-best": "nbest num_return_sequences",
    "output": "dir o out outdir outfile out_dir output_dir output_file save save_dir",
    "overwrite": "f force overwrite_output_dir",
    "top-p": "nucleus p",
    "top-k": "k",
    # Commands
    "compare": "significance",
    "explore": "attention browse interpret serve visualize",
    "export": "convert onnx",
    "fit": "continue learn resume run start train",
    "generate": "decode infer inference predict sample translate",
    "list": "experiments ls",
    "plan": "dry_run estimate memory",
    "report": "figure plot show",
    "score": "perplexity",
    "sweep": "hpo optimize search tune",
    "test": "eval evaluate",
    "validate": "val",
}
"""Names in other projects, with underscores, by the setting, option or command that corresponds to them."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a synonym, the closest known name, or all names."""
    names = list(names)
    close = synonyms(name, names) or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        return f"; available: {', '.join(names)}"
    return f"; did you mean {close[0] if close[0].startswith('-') else repr(close[0])}?"


def synonyms(name: str, names: Iterable[str]) -> list[str]:
    """Return which of some names other projects call by a name.

    Args:
        name: the last part of it counts, in any case, with hyphens or underscores.
        names: names as in SYNONYMS, or options, which begin with two hyphens.
    """
    other = name.rpartition(".")[2].lstrip("-").replace("-", "_").lower()
    return [here for here in names if other in SYNONYMS.get(here.removeprefix("--"), "").split()]


class Interrupted(BaseException):
    """Exception that ends a command after a signal.

    Args:
        signum: the number of the signal.
        saved_step: the step of the last checkpoint that this process has saved; None if it has saved none.
        ckpt_path: the value of --ckpt_path that resumes the run; None if there is no checkpoint yet.
    """

    def __init__(self, signum: int, saved_step: int | None = None, ckpt_path: str | None = None) -> None:
        super().__init__(signum)
        self.signum, self.saved_step, self.ckpt_path = signum, saved_step, ckpt_path


def fit_terminal(text: str, stream: TextIO | None) -> str:
    """Return a message, wrapped at spaces if it is printed to a terminal, which would break a word at its edge."""
    if stream is None or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)


def rank_zero_print(text: str) -> None:
    """Print a message to standard error on the process of rank 0 only."""
    if is_main_process() and _rank("RANK", "SLURM_PROCID") == 0:
        with suppress(OSError):  # the terminal was closed
            message = fit_terminal(f"lightning-tfm: {escape_controls(text)}", sys.stderr)
            tqdm.write(message, file=sys.stderr)  # above progress bars


def escape_controls(text: str) -> str:
    r"""Replace the control characters of a text, except tab and line feed, by escapes such as \x1b.

    Otherwise, a text from data or the name of a file could move the cursor of a terminal, or change its settings.
    """
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shell_quote(text: str) -> str:
    """Quote an argument for bash like `shlex.quote`, escaping non-printable characters.

    In a pasted command, a tab would act as a key press, and a line feed would end the line.
    """
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": "\\\\", "'": "\\'", "\t": "\\t", "\n": "\\n"}

    def escaped(character: str) -> str:
        if character in escapes or character.isprintable():
            return escapes.get(character, character)
        return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))

    return f"$'{''.join(map(escaped, text))}'"


def format_command(words: Iterable[str], stream: TextIO) -> str:
    """Return a command that is printed to be copied, indented.

    In a terminal, a line that would be too long ends with a backslash before an argument; an option and its value stay
    together. In a file or a pipe, the command is one line.

    Args:
        words: the program, its command and the arguments, quoted as for bash.
        stream: the stream to which the command is printed.
    """
    program, command, *arguments = words
    groups = [f"{program} {command}"]
    for argument in arguments:
        if groups[-1].startswith("-") and " " not in groups[-1] and not argument.startswith("-"):
            groups[-1] += f" {argument}"
        else:
            groups.append(argument)
    width = shutil.get_terminal_size().columns if stream.isatty() else math.inf
    lines = [f"  {groups[0]}"]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {group}")
        else:
            lines[-1] += f" {group}"
    return "\n".join(lines)


def handle_signals(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Install a handler for SIGNALS, except those inherited as ignored, for example under `nohup`.

    Returns:
        The previous handlers, by signal.
    """
    handled = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in handled}


def ignore_signals() -> None:
    """Ignore SIGNALS from now on.

    Note:
        With SIG_IGN, Python would print a traceback for a signal that has just arrived.
    """
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: None)


def is_main_process() -> bool:
    """Return whether this is the main process of its machine."""
    return _rank("LOCAL_RANK", "SLURM_LOCALID") == 0


def _rank(*variables: str) -> int:
    """Return the value of the first environment variable that is set; 0 if none is."""
    return int(next((os.environ[name] for name in variables if name in os.environ), 0))


def requeue() -> None:
    """Requeue the SLURM job of this process, if it has rank 0 in one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or _rank("RANK", "SLURM_PROCID"):
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
        print(f"lightning-tfm: requeued job {job}", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        print(f"lightning-tfm: error: {' '.join(command)} failed: {reason}", file=sys.stderr)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by raising Interrupted, unless an earlier one is ending the command."""
    if interruption(sys.exc_info()[1]) is None:
        raise Interrupted(signum)


def interruption(error: BaseException | None) -> Interrupted | None:
    """Return the first `Interrupted` in the context chain of an error; None if there is none."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error
