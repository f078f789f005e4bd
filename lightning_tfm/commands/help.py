"""`lightning-tfm fit --help`, and that of `validate` and `test`: the settings that most users need, on one screen."""

from __future__ import annotations

SETTINGS = """\
  -c, --config YAML          add the settings of a YAML; later ones override
  --ckpt_path CHECKPOINT     {ckpt_path}
  --seed_everything N        seed of the data, the weights and dropout
  --dry-run                  check all settings, run a batch, write nothing
  --print_config             print all settings as YAML
  --data CLASS               Copy, Date, ToyTranslation, Tsv, ParallelText, Text
                             or Sentiment; .batch_size N; .train, .val, .test
  --model CLASS              Seq2SeqModule, LanguageModel, MaskedLanguageModel,
                             Classifier; .optimizer.lr X, .label_smoothing X
  --model.network CLASS      Transformer, GPT, AttentionLSTM, LinearTransformer,
                             MaskedEncoder, EncoderClassifier; .d_model N, ...
  --trainer.max_steps N      training steps; .val_check_interval N
  --trainer.precision P      32-true, bf16-mixed, 16-mixed, 64-true
  --trainer.devices N        with .accelerator cpu or gpu, .strategy ddp
  --trainer.callbacks+=CLASS WeightAveraging, EarlyStopping, Compile, ...
  --trainer.logger false     write no run folder
  --checkpoint.monitor NAME  metric that selects the best checkpoint

  --help-all                 all settings, also those of Lightning's Trainer
  --data.help Date           settings of a class; also --model.network.help GPT
"""

USAGE = {
    "fit": (
        "lightning-tfm fit EXPERIMENT [--SETTING VALUE ...]",
        "Train the model of an experiment, then test its best checkpoint.",
        "resume: last, the folder of a run, or a file",
    ),
    "validate": (
        "lightning-tfm validate CHECKPOINT [--SETTING VALUE ...]",
        "Evaluate a checkpoint on the validation data of its experiment.",
        "with --config: the checkpoint, or last",
    ),
    "test": (
        "lightning-tfm test CHECKPOINT [--SETTING VALUE ...]",
        "Evaluate a checkpoint on the test data of its experiment.",
        "with --config: the checkpoint, or last",
    ),
}
"""The usage of a command, its purpose, and the meaning of `--ckpt_path`."""


def help_text(command: str) -> str:
    """Return the help of `fit`, `validate` or `test` for `--help`."""
    usage, purpose, ckpt_path = USAGE[command]
    return f"usage: {usage}\n{purpose}\n\n{SETTINGS.format(ckpt_path=ckpt_path)}"
