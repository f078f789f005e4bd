"""Private names of other packages, which an update may rename."""

import ast
import inspect
import re
import sys
import warnings
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jsonargparse
import lightning.pytorch.loggers
import optuna
import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.overrides import distributed
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sacrebleu.metrics import BLEU, CHRF
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from lightning_tfm.system import private

PACKAGE = Path(private.__file__).parents[1]

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != Path(private.__file__))

PUBLIC = {"_asdict", "_fields", "_replace", "_exit", "_abc_impl"}
"""Names that are documented or set by Python, in spite of the underscore."""

OVERRIDDEN = {
    ("LightningCLI", "_parse_ckpt_path"),
    ("LightningCLI", "_prepare_subcommand_kwargs"),
    ("LightningCLI", "_prepare_subcommand_parser"),
    ("LightningCLI", "_run_subcommand"),
    ("Metric", "_apply"),
    ("ModelParallelStrategy", "_setup_distributed"),
    ("Module", "_apply"),
    ("WeightAveraging", "_swap_models"),
    ("_ExperimentWriter", "_check_log_dir_exists"),
}
"""Private methods of other packages, by class, that classes of this package override."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def private_names_of_others(source: str) -> list[str]:
    """Return the private names that a file imports, or uses of other objects than self, cls and super()."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split("(")[0] not in ("self", "cls", "super"):
            names.append(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names.append(ast.unparse(node.args[1]).strip("'"))
    return [*filter(is_private, names)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_others_are_used_in_one_file(path):
    assert private_names_of_others(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line", ["from torch._tools import a", "from torch import _a", "import torch._a", "x()._a", 'getattr(x, "_a", 1)']
)
def test_a_private_name_of_another_object_is_found(line):
    assert len(private_names_of_others(line)) == 1


@cache
def private_names(cls: type) -> set[str]:
    """Return the private names that a class defines, or uses of itself."""
    used = re.findall(r"(?:self|super\([^()]*\))\.(\w+)", inspect.getsource(cls))
    return {*filter(is_private, [*vars(cls), *used])}


def test_private_names_of_base_classes_are_only_overridden():
    others = ("lightning.", "torch.nn", "torch.optim", "torch.utils", "torchmetrics", "jsonargparse", "argparse")
    used = set()
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        module = import_module(name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == name:
                bases = (base for base in cls.__mro__[1:] if base.__module__.startswith(others))
                used |= {(base.__name__, name) for base in bases for name in private_names(cls) & private_names(base)}
    assert used == OVERRIDDEN


def test_the_arguments_of_a_parser_are_listed():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    assert "size" in [action.dest for action in private.actions(parser)]


def test_the_value_of_a_setting_is_not_read_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(jsonargparse._optionals, "_config_read_mode", "fr")
    (tmp_path / "a.yaml").write_text("size: 3\n")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type("Group", (), {"__init__": make}), "group", sub_configs=True)
    assert parser.parse_args([f"--group={tmp_path / 'a.yaml'}"]).group.size == 3
    private.read_no_files()
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args([f"--group={tmp_path / 'a.yaml'}"])


def make(self, size: int = 1):
    """Accept a size."""


def test_the_loader_of_the_parser_is_replaced(monkeypatch):
    monkeypatch.setattr(jsonargparse._loaders_dumpers, "yaml_default_loader", None)
    streams = []

    class Loader(private.yaml_loader()):
        def __init__(self, stream):
            streams.append(stream)
            super().__init__(stream)

    private.replace_yaml_loader(Loader)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--sizes", type=list[int])
    assert parser.parse_args(["--sizes=[1, 2]"]).sizes == [1, 2]
    assert "[1, 2]" in streams


@pytest.mark.parametrize(
    ("read", "make", "settings"),
    [
        (private.start_method, DDPStrategy, {"start_method": ("popen", "fork")}),
        (private.stops_after_epochs, partial(EarlyStopping, "val/loss"), {"check_on_train_epoch_end": (False, True)}),
        (private.saves_after_epochs, ModelCheckpoint, {"save_on_train_epoch_end": (False, True)}),
        (private.epochs_between_saves, ModelCheckpoint, {"every_n_epochs": (1, 3)}),
        (private.timer_interval, Timer, {"interval": ("step", "epoch")}),
        (private.logger_version, partial(CSVLogger, "runs"), {"version": (None, "version_3")}),
    ],
)
def test_a_setting_that_is_private_is_read(read, make, settings):
    ((name, values),) = settings.items()
    for value in values:
        assert read(make(**{name: value})) == value


def test_only_the_default_timeout_of_a_strategy_is_replaced():
    limits = []
    for strategy in (DDPStrategy(), DDPStrategy(timeout=timedelta(seconds=7))):
        private.replace_default_timeout(strategy, timedelta(seconds=3))
        limits.append(strategy._timeout)
    assert limits == [timedelta(seconds=3), timedelta(seconds=7)]


def test_the_version_and_the_writer_of_a_logger_are_set(tmp_path):
    logger = CSVLogger(tmp_path, "mine")
    assert private.logger_version(logger) is None
    private.set_version(logger, "test_3")
    private.set_writer(logger, writer := object())
    assert logger.log_dir == str(tmp_path / "mine/test_3")
    assert logger.experiment is writer


def test_the_trainer_keeps_the_sampler():
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert trainer._accelerator_connector.use_distributed_sampler
    private.keep_sampler(trainer)
    assert not trainer._accelerator_connector.use_distributed_sampler


def test_a_module_with_a_trainer_is_known():
    module = BoringModel()
    assert not private.has_trainer(module)
    module.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert private.has_trainer(module)


class Recorder(BoringModel):
    """Module that records what follows each batch."""

    def on_fit_start(self):
        self.states = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.states.append((private.is_within_step(self.trainer), private.is_before_validation(self.trainer)))


def test_what_follows_a_batch_is_known():
    settings = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "val_check_interval": 4, "max_epochs": 1}
    settings |= {"limit_val_batches": 1, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**settings, logger=False, enable_checkpointing=False, accelerator="cpu")
    with warnings.catch_warnings(action="ignore"):  # the loaders have no workers
        trainer.fit(module := Recorder())
    assert module.states == [(True, False), (False, False), (True, False), (False, True), (False, False)]


def test_lightning_exchanges_sigterm_by_the_method_that_is_replaced():
    loop = (trainer := Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")).fit_loop.epoch_loop
    before = loop._broadcast_sigterm_tensor
    private.disable_sigterm_broadcast(trainer)
    assert loop._broadcast_sigterm_tensor != before
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop))


@pytest.mark.parametrize("owner", [nn.parallel.DistributedDataParallel, distributed], ids=["torch", "lightning"])
def test_ddp_reads_the_buffers_that_are_not_broadcast(owner):
    private.skip_buffers_in_broadcast(module := LightningModule(), ["table"])
    (name,) = vars(module).keys() - vars(LightningModule()).keys()
    assert vars(module)[name] == ["table"]
    assert name in inspect.getsource(owner)


def test_the_data_parallel_size_of_a_strategy_is_set():
    strategy, expected = ModelParallelStrategy(data_parallel_size=1), ModelParallelStrategy(data_parallel_size=4)
    private.set_data_parallel_size(strategy, 4)
    assert strategy._data_parallel_size == expected._data_parallel_size


def test_lightning_saves_the_average_that_is_set():
    callback, average = WeightAveraging(), AveragedModel(nn.Linear(2, 2))
    private.set_averaged_model(callback, average)
    assert private.averaged_model(callback) is average
    callback.on_save_checkpoint(None, None, checkpoint := {"state_dict": {}})
    assert checkpoint["state_dict"].keys() == average.module.state_dict().keys()


def test_tensorboard_hides_later_steps(tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    logger = lightning.pytorch.loggers.TensorBoardLogger(tmp_path)
    private.hide_later_steps(logger, 7)
    logger.experiment.close()
    (path,) = Path(logger.log_dir).iterdir()
    assert [event.step for event in loading.EventFileLoader(str(path)).Load() if event.HasField("session_log")] == [7]


def test_the_arguments_of_wandb_are_known(monkeypatch, tmp_path):
    wandb, arguments = pytest.importorskip("wandb"), {}
    monkeypatch.setenv("WANDB_MODE", "offline")  # which Lightning sets
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", lambda **settings: arguments.update(settings))
    for offline in (False, True):
        logger = lightning.pytorch.loggers.WandbLogger(save_dir=tmp_path, offline=offline)
        assert private.is_offline(logger) is offline
        assert private.writer_of(logger) is None
    private.wandb_arguments(logger)["name"] = "mine"
    _ = logger.experiment
    assert arguments["name"] == "mine"


def test_the_launch_package_of_wandb_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb.sdk.launch", raising=False)
    with private.without_wandb_launch(), pytest.raises(ImportError):
        import_module("wandb.sdk.launch")
    assert "wandb.sdk.launch" not in sys.modules


@pytest.mark.parametrize("metric", [BLEU(force=True), CHRF()], ids=["bleu", "chrf"])
def test_the_score_of_a_corpus_follows_from_the_statistics_of_its_outputs(metric):
    outputs, references = ["a small cat", "the dog runs far away"], ["a small cat sat", "the dog runs away"]
    statistics = private.corpus_statistics(metric, outputs, references)
    expected = metric.corpus_score(outputs, [references]).score
    assert private.corpus_score(metric, statistics.sum(0)) == pytest.approx(expected)


def test_a_running_trial_is_taken_up_and_its_heart_beats():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, beats = optuna.create_study(), []
    begun = study.ask()
    trial = private.running_trial(study, study.get_trials()[begun.number])
    trial.set_user_attr("index", 3)
    assert begun.user_attrs == {"index": 3}
    private.record_heartbeat(SimpleNamespace(record_heartbeat=beats.append), trial)
    assert beats == [study.get_trials()[begun.number]._trial_id]


def test_the_default_store_of_a_group_is_known():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        private.default_store().set("name", "value")
        assert private.default_store().clone().get("name") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_of_the_fake_mode_have_no_memory():
    with private.fake_mode():
        assert torch.empty(10**15).shape == (10**15,)
        with private.without_fake_mode():
            assert torch.ones(2).sum().item() == 2


def test_the_peak_of_memory_is_tracked_over_two_calls_of_a_module():
    layer, tracker = nn.Linear(64, 64), private.memory_tracker()
    tracker.track_external(layer)
    with tracker:
        layer(layer(torch.ones(8, 64))).sum().backward()
    (peak,) = (snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    assert peak >= 4 * 64 * 65


def test_operators_are_observed():
    results = {}
    with private.observe_operators(lambda operator, args, result: results.update({operator.__name__: result})):
        torch.ones(2) + 1
    assert results["add.Tensor"].tolist() == [2, 2]


def test_the_operators_of_attention_on_a_cpu_have_formulas():
    query, operators = torch.ones(1, 2, 8, 4, requires_grad=True), set()
    with private.observe_operators(lambda operator, args, result: operators.add(operator.overloadpacket)):
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert private.cpu_attention_flops().keys() <= operators


def test_a_gradient_scaler_reads_what_a_fused_optimizer_says():
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], fused=True)
    before = dict(vars(optimizer))
    private.unscale_before_step(optimizer)
    ((name, value),) = ((name, value) for name, value in vars(optimizer).items() if value is not before.get(name))
    assert (before[name], value) == (True, False)
    assert name in inspect.getsource(torch.amp.grad_scaler)


def test_tensors_are_changed_and_measured_together():
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([1.0])]
    assert torch.stack(private.norms(tensors, torch.float64)).tolist() == [5, 1]
    private.add_in_place(tensors, [torch.ones(2), torch.ones(1)])
    private.multiply_in_place(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[8, -6], [4]]


def test_the_gradient_of_a_softmax_is_that_of_autograd():
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output, gradient = scores.softmax(-1), torch.arange(12.0).view(3, 4)
    output.backward(gradient)
    private.softmax_backward(gradient, output.detach(), into=(result := torch.empty(3, 4)))
    torch.testing.assert_close(result, scores.grad)


def test_the_support_of_bfloat16_is_known():
    assert private.has_cpu_bfloat16() in (False, True)


def test_a_forward_hook_is_found():
    layer = nn.Linear(1, 1)
    assert not private.has_forward_hooks(layer)
    layer.register_forward_hook(lambda *_: None)
    assert private.has_forward_hooks(layer)
