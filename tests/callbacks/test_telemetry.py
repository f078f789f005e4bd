"""Speed, operations and memory of the training."""

from types import SimpleNamespace

import pytest
import torch

from lightning_tfm.callbacks.telemetry import Telemetry, peak_flops, step_flops
from lightning_tfm.data import Batch
from lightning_tfm.networks import GPT
from support.training import MODELS, make_module, make_trainer, small_copy


def test_flops_of_a_step_are_those_of_its_matrix_products():
    B, T, D, V, layers = 3, 20, 16, 11, 2
    network = GPT(V, D, 2, layers, max_length=T)
    tokens = torch.randint(3, V, (B, T))
    products = 2 * B * T * (layers * 12 * D**2 + D * V)  # 4 D^2 in attention, 8 D^2 in the feed-forward layer
    attention = layers * 2 * 2 * B * T**2 * D  # queries with keys, weights with values
    flops = step_flops(network, Batch(tokens[:, :0], tokens, tokens, torch.arange(len(tokens))))
    assert 3 * products <= flops <= 3 * (products + attention)


@pytest.mark.parametrize("model", MODELS)
def test_utilization_is_achieved_over_peak_flops(model, monkeypatch):
    """The device performs a thousand operations per second."""
    monkeypatch.setattr("lightning_tfm.callbacks.telemetry.peak_flops", lambda device, half: 1000.0)
    data = small_copy(batch_size=16)
    module = make_module(data, model)
    telemetry = Telemetry()
    trainer = make_trainer(max_steps=4, log_every_n_steps=4, callbacks=[telemetry])
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    if model == "attention_lstm":  # torch does not count the operations of its kernels
        assert "trainer/mfu" not in metrics
    else:
        used = metrics["trainer/tokens_per_second"].item() * telemetry.flops_per_token / 1000
        assert metrics["trainer/mfu"].item() == pytest.approx(used, rel=1e-4)
        assert (
            telemetry.flops_per_token > 2 * 3 * sum(p.numel() for p in module.network.parameters() if p.dim() > 1) / 4
        )


def test_gpu_memory_is_logged(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    logged = {}
    module = SimpleNamespace(device=torch.device("cuda"), log_dict=logged.update)
    strategy = SimpleNamespace(reduce=lambda value, group, reduce_op: value)
    trainer = SimpleNamespace(global_step=50, log_every_n_steps=50, strategy=strategy)
    telemetry = Telemetry()
    telemetry.peak = None
    telemetry._begin(0)
    telemetry.on_train_batch_end(trainer, module, None, SimpleNamespace(tokens=torch.tensor(7)), 49)
    assert set(logged) == {"trainer/tokens_per_second", "trainer/gpu_memory_gib"}
    assert logged["trainer/gpu_memory_gib"] == 3.0


def test_peak_flops_are_those_of_dense_matrix_products(monkeypatch):
    """For an H200 it is that of the data sheet, for other devices that of Lightning."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda")
    assert peak_flops(device, half=True) == 989e12
    assert peak_flops(device, half=False) == 67e12
    torch.set_float32_matmul_precision("high")
    assert peak_flops(device, half=False) == 495e12
    assert peak_flops(torch.device("cpu"), half=True) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    peaks = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr("lightning_tfm.callbacks.telemetry.get_available_flops", lambda device, dtype: peaks[dtype])
    assert (peak_flops(device, half=True), peak_flops(device, half=False)) == (2.0, 1.0)
