"""Bits of trained weights on emulated processors, with and without the settings that fix the kernels.

`python -m benchmarks.portable_bits` trains the nine experiments on this processor and on others, which `processor.c`
emulates at full speed, and prints the hashes of the weights for each set of environment variables. `--time` measures
the processor time of the steps on this processor instead. The exit status is 1 if an experiment has two hashes with
the set "portable".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, cast

from lightning_tfm.system.portability import VARIABLES

MODELS = ("transformer", "gpt", "attention_lstm")
EXPERIMENTS = [f"{task}_{model}" for model in MODELS for task in ("copy", "date", "toy_translation")]

SETS: dict[str, dict[str, str]] = {
    "none": {},
    "portable": VARIABLES,
    "mkl_avx2": VARIABLES | {"MKL_CBWR": "AVX2"},
    "sse4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""Sets of environment variables, which must be set before torch is imported."""

PROCESSORS: dict[str, dict[str, str]] = {
    "this": {},
    "avx512": {"PROCESSOR": "avx512"},
    "avx2": {"PROCESSOR": "avx2"},
    "avx2,amd": {"PROCESSOR": "avx2,amd"},
    "sse4.2,amd": {"PROCESSOR": "sse4.2,amd", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"},
}
"""Environment variables of emulated processors, see `processor.c`; libm chooses its kernels before it is loaded."""

LIBRARY = Path(gettempdir()) / "processor.so"

SETTINGS = (
    *("--trainer.limit_val_batches=0", "--trainer.logger=false", "--trainer.enable_progress_bar=false", "--skip_test"),
    *("--trainer.callbacks=[]", "--trainer.enable_model_summary=false"),
    *("--data.init_args.train_size=2000", "--data.init_args.val_size=100", "--data.init_args.test_size=100"),
)


def train(names: Sequence[str], steps: int) -> dict[str, tuple[str, float]]:
    """Return the hash of the weights of each experiment after training, and the processor time of its steps."""
    from lightning import Callback, LightningModule, Trainer

    from lightning_tfm.comparison.tensors import fingerprint
    from lightning_tfm.fit.cli import TfmCLI, run

    class Clock(Callback):
        """Callback that measures the processor time from the end of the first step."""

        seconds = 0.0

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 1:
                self.start = time.process_time()
            self.seconds = time.process_time() - self.start

    results = {}
    for name in names:
        clock = Clock()

        class TimedCLI(TfmCLI):
            """TfmCLI that trains with the clock, and does not test."""

            def instantiate_trainer(self, clock: Clock = clock, **kwargs: Any) -> Trainer:
                trainer = super().instantiate_trainer(**kwargs)
                trainer.callbacks.append(clock)
                return trainer

            def after_fit(self) -> None:
                """Do not test."""

        cli = run(["fit", "--config", name, f"--trainer.max_steps={steps}", *SETTINGS], TimedCLI)
        results[name] = fingerprint(*cli.model.state_dict().values()).hex()[:12], clock.seconds
    return results


def trained(names: Sequence[str], steps: int, variables: str, processor: str) -> dict[str, tuple[str, float]]:
    """Return what `train` returns in a process of its own, with a set of variables, on a processor."""
    command: list[str] = [sys.executable, "-m", "benchmarks.portable_bits", "--steps", str(steps), "--train", *names]
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY)} | PROCESSORS[processor] | SETS[variables]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE)
    return cast(dict[str, tuple[str, float]], json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Print the hashes, or the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", type=int, metavar="PAIRS", help="compare the time of two sets in PAIRS pairs of runs")
    parser.add_argument("--processors", nargs="+", choices=PROCESSORS, default=["this", "avx2,amd"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["none", "portable"])
    parser.add_argument("--names", nargs="+", default=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--train", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            print(json.dumps(train(options.train, options.steps)))
        return 0
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", LIBRARY, Path(__file__).with_name("processor.c")], check=True
    )
    if options.time:
        pairs = [
            [trained(options.names, options.steps, each, "this") for each in options.sets] for _ in range(options.time)
        ]
        for name in options.names:
            ratios = [second[name][1] / first[name][1] for first, second in pairs]
            print(f"{name}: {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
        return 0
    hashes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for processor in options.processors:
        for variables in options.sets:
            for name, (weights, seconds) in trained(options.names, options.steps, variables, processor).items():
                hashes[variables, name].add(weights)
                print(f"{variables:10}{processor:12}{name:30}{weights}{seconds:8.2f} s", flush=True)
    return int(any(len(found) > 1 for (variables, _), found in hashes.items() if variables == "portable"))


if __name__ == "__main__":
    sys.exit(main())
