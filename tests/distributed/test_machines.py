"""Several machines, which are network namespaces joined by a virtual cable, and the loss of their processes."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from lightning_tfm.callbacks import Heartbeat
from lightning_tfm.distributed import launch
from lightning_tfm.errors import UserError
from lightning_tfm.runs.record import Run
from support.equality import assert_same_run
from support.experiments import fit, folder, made_once, new_folders, tiny, wait_for_step
from support.processes import (
    ENVIRONMENT,
    EXPERIMENTS,
    TWO_PROCESSES,
    Child,
    free_port,
    run,
    start,
    start_elastic,
    start_two,
)

pytestmark = pytest.mark.run

ENDLESS = {"trainer.max_steps": 100_000, "heartbeat.timeout": 5, "checkpoint.every_n_train_steps": 1}
LIMIT = 60  # seconds in which all survivors of a loss end
PORT = "29500"  # free in a new namespace


@dataclass
class Machine:
    """Network namespace with an end of the cable, `cable`."""

    name: str
    address: str

    @property
    def network(self):
        return Path("/run/netns") / self.name

    def ip(self, *arguments):
        subprocess.run(["ip", "-netns", self.name, *arguments], check=True)

    def pids(self):
        """Return the processes of the machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def signal(self, signum):
        """Signal all processes of the machine."""
        for pid in self.pids():
            os.kill(pid, signum)


@pytest.fixture
def machines():
    """Return two machines, which are joined by a cable and end with the test."""
    name = f"tfm_{uuid4().hex[:8]}"
    both = [Machine(f"{name}_{number}", f"10.0.0.{number + 1}") for number in (0, 1)]
    for machine in both:
        subprocess.run(["ip", "netns", "add", machine.name], check=True)
    try:
        ends = [("name", "cable", "netns", machine.name) for machine in both]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for machine in both:
            machine.ip("address", "add", f"{machine.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                machine.ip("link", "set", device, "up")
        yield both
    finally:
        for machine in both:
            machine.signal(signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", machine.name], check=True)


def elastic(nodes, devices, **settings):
    """Return the arguments of a run with elastic determinism on several nodes."""
    options = {"num_nodes": nodes, "devices": devices, "strategy.init_args.num_micro_batches": 4}
    options = (f"--trainer.{name}={value}" for name, value in options.items())
    return fit("gpt", "--trainer.accelerator=cpu", "--config", EXPERIMENTS / "elastic.yaml", *options, **settings)


def start_nodes(machines, devices, cwd, fault=None, **settings):
    """Start a run on machines with the variables of Lightning; return the processes by rank."""
    shared = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "cable"}
    return [
        start(
            *elastic(len(machines), devices, **settings),
            cwd=cwd,
            network=machine.network,
            fault=fault if node == rank == 0 else None,
            NODE_RANK=str(node),
            LOCAL_RANK=str(rank),
            **shared,
        )
        for node, machine in enumerate(machines)
        for rank in range(devices)
    ]


def assert_ended(child, message):
    """Assert that a process has ended within the limit, with a line."""
    child.process.join(LIMIT)
    assert child.process.exitcode == 1, child.err.read_text()
    printed = child.err.read_text()
    assert re.search(f"^lightning-tfm: error: {message}.*; resume with --ckpt_path last$", printed.splitlines()[-1])
    assert "Traceback" not in printed


LONG = {"trainer.max_steps": 240, "trainer.val_check_interval": 60}


@pytest.fixture
def alone(tmp_path_factory):
    """Return the folder of a run of one process with elastic determinism."""
    return made_once("alone", lambda cwd: start(*elastic(1, 1, **LONG), cwd=cwd).finish(), tmp_path_factory)


def test_two_machines_train_as_one_process(alone, machines, tmp_path):
    for rank in start_nodes(machines, 1, tmp_path, **LONG):
        rank.finish()
    assert_same_run(tmp_path, alone, "gpt", same_processes=False)


@pytest.mark.parametrize("fault", ["cut link", "stopped process"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_loss_ends_the_others(fault, lost, machines, tmp_path):
    both = start_nodes(machines, 1, tmp_path, **ENDLESS)
    wait_for_step(5, both[0].process, tmp_path, "gpt")
    if fault == "cut link":
        machines[lost].ip("link", "set", "cable", "down")
        assert_ended(both[lost], f"lost rank {1 - lost} on .*: no answer")
    else:
        os.kill(both[lost].process.pid, signal.SIGSTOP)
    assert_ended(both[1 - lost], f"lost rank {lost} on .*: no answer")


def test_a_lost_machine_is_named(machines, tmp_path):
    four = start_nodes(machines, 2, tmp_path, **ENDLESS)
    wait_for_step(5, four[0].process, tmp_path, "gpt")
    machines[1].signal(signal.SIGKILL)
    for child in four[:2]:
        assert_ended(child, "lost rank 2 on .*, rank 3 on .*: no answer")


def test_survivors_of_a_kill_during_a_checkpoint_end(tmp_path):
    """Only the process of rank 0 writes, and it is killed while the three others wait for it."""
    child = start_elastic(
        4, *fit("gpt", **ENDLESS), cwd=tmp_path, num_micro_batches=4, fault=("while a checkpoint is written", 3)
    )
    child.process.join(LIMIT)
    assert child.process.exitcode == -9
    for rank, process in enumerate(child.others, start=1):
        assert_ended(Child(process, child.out, tmp_path / f"stderr_{rank}"), "lost rank 0 on .*: no answer")


def test_a_busy_process_is_not_lost(tmp_path):
    """A process computes for longer than the limit of the heartbeats, while the other one waits for it."""
    (tmp_path / "busy.py").write_text(
        "import time\n"
        "from lightning import Callback\n"
        "class Busy(Callback):\n"
        "    def on_validation_start(self, trainer, pl_module):\n"
        "        end = time.monotonic() + 8 * trainer.global_rank\n"
        "        while time.monotonic() < end:\n"
        "            pass\n"
    )
    options = ["--trust-package=busy", "--trainer.callbacks+=busy.Busy", "--heartbeat.timeout=5"]
    child = start_two(*fit("gpt", *options, **{"trainer.max_steps": 12}), cwd=tmp_path)
    assert "lost" not in child.finish().err.read_text()


@pytest.mark.soak
def test_processes_that_were_all_stopped_go_on(tmp_path):
    """As by Ctrl-Z and `fg`: none takes the others for lost, however long they were stopped."""
    child = start_two(*fit("gpt", **{"heartbeat.timeout": 5, "trainer.max_steps": 300}), cwd=tmp_path)
    processes = [child.process, *child.others]
    wait_for_step(5, child.process, tmp_path, "gpt")
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            os.kill(process.pid, signum)
        time.sleep(8 if signum == signal.SIGSTOP else 0)
    assert "lost" not in child.finish().err.read_text()


def test_an_error_of_one_process_ends_the_others(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from lightning import Callback\n"
        "from lightning_tfm.errors import UserError\n"
        "class Broken(Callback):\n"
        "    def on_validation_start(self, trainer, pl_module):\n"
        "        if trainer.global_rank:\n"
        "            raise UserError('the disk of this machine must not be full')\n"
    )
    options = ["--trust-package=broken", "--trainer.callbacks+=broken.Broken"]
    child = start_two(*fit("gpt", *options), cwd=tmp_path)
    assert_ended(child, "lost rank 1 on .*: no answer, so it has ended")
    assert "the disk of this machine must not be full" in (tmp_path / "stderr_1").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("answers", [False, True])
def test_a_port_in_use_ends_all_processes(answers, tmp_path):
    """Another program has opened the port: it closes each connection, or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        if answers:

            def close():
                with suppress(OSError):
                    while True:
                        other.accept()[0].close()

            threading.Thread(target=close, daemon=True).start()
        port = str(other.getsockname()[1])
        settings = {"cwd": tmp_path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
        both = [start(*fit("gpt", *TWO_PROCESSES), **settings, LOCAL_RANK=rank) for rank in ("0", "1")]
        assert [child.wait() for child in both] == [2, 2]
    both[0].refuse(f"MASTER_PORT must be a free port on the machine of rank 0, but another program uses {port}")
    assert "Traceback" not in both[1].err.read_text()
    assert not list(tmp_path.glob("runs/copy_gpt/*"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_other_machines(rank, signum, status, tmp_path):
    """Two of four machines do not start."""
    port = free_port()
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    both = [start(*elastic(4, 1), cwd=tmp_path, NODE_RANK=str(node), **settings) for node in (0, 1)]
    child = both[rank]
    while child.process.is_alive():
        with suppress(OSError):  # until the store of rank 0 answers
            socket.create_connection(("127.0.0.1", port)).close()
            break
        time.sleep(0.1)
    os.kill(child.process.pid, signum)
    child.process.join(LIMIT)
    try:
        assert child.process.exitcode == status
        assert f"interrupted by {signum.name}" in child.err.read_text()
        assert "Traceback" not in child.err.read_text()
    finally:
        for each in both:
            each.process.kill()
            each.process.join()


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("option", "environment", "message"),
    [
        ("devices=640", {}, "devices must be at most .* on this machine, which has .* cores, but is 640"),
        ("num_nodes=2", {}, "num_nodes must be 1 without a launcher of several machines, but is 2"),
        ("devices=0", {}, "devices must be at least 1, but is 0; try 1"),
        ("accelerator=gpu", {}, "accelerator must be available on this machine, but is gpu; try auto"),
        ("devices=3", TORCHRUN, r"devices must be the number that torchrun has started \(2\), but is 3; leave it out"),
    ],
)
def test_devices_that_do_not_exist_are_refused(option, environment, message, tmp_path):
    arguments = fit("gpt", "--trainer.accelerator=cpu", "--trainer.strategy=ddp", f"--trainer.{option}")
    run(*arguments, cwd=tmp_path, **environment).refuse(f"error: trainer.{message}")
    assert not list(tmp_path.glob("runs/copy_gpt/*"))


def test_a_machine_without_ipv4_needs_an_address(monkeypatch, command):
    def refuse(*args, **settings):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "create_server", refuse)
    _, err = command(*fit("gpt", *TWO_PROCESSES), status=2)
    assert "MASTER_ADDR must be set on a machine without IPv4, but is unset; set MASTER_ADDR=::1" in err


def test_a_process_that_does_not_come_is_named_even_if_another_has_come_twice(monkeypatch):
    port = free_port()
    monkeypatch.setattr(launch, "TIMEOUT", timedelta(seconds=3))

    def meet(rank):
        environment = SimpleNamespace(
            creates_processes_externally=True,
            node_rank=lambda: 0,
            local_rank=lambda: rank,
            main_address="127.0.0.1",
            main_port=port,
        )
        strategy = SimpleNamespace(cluster_environment=environment)
        launch.meet_processes(SimpleNamespace(strategy=strategy, num_nodes=1, num_devices=3))

    def come():
        with suppress(UserError):
            meet(1)

    restarted = [threading.Thread(target=come) for _ in range(2)]
    for thread in restarted:
        thread.start()
    with pytest.raises(UserError, match=r"all 3 processes .* but process 2 of node 0 did not"):
        meet(0)
    for thread in restarted:
        thread.join()


def test_a_short_limit_is_refused():
    with pytest.raises(UserError, match=r"heartbeat.timeout must be at least 5 s, but is 1; try 20"):
        Heartbeat(timeout=1)


JOINED = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(Path(__file__).parents[2])}
"""Environment of a command on one of the machines."""


def torchrun(machine, host, nodes, cwd, *arguments):
    """Start a command with torchrun on a machine, whose output is in the file `stderr_MACHINE`."""
    options = {
        "nnodes": nodes,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{host.address}:{PORT}",
        "rdzv-conf": f"is_host={int(machine is host)},last_call_timeout=2,keep_alive_interval=1",
        "local-addr": machine.address,
    }
    command = ["ip", "netns", "exec", machine.name, sys.executable, "-m", "torch.distributed.run"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(cwd / f"stderr_{machine.name}", "a") as output:
        return subprocess.Popen(
            [*command, "-m", "lightning_tfm", *map(str, arguments)],
            cwd=cwd,
            env=JOINED | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=output,
            stderr=output,
        )


@pytest.mark.parametrize("comes_back", [pytest.param(False, marks=pytest.mark.soak), True])
def test_torchrun_goes_on_after_the_loss_of_a_machine(comes_back, alone, machines, tmp_path):
    """The run goes on from the last checkpoint: alone, or with the machine once it is back."""
    first, second = machines
    arguments = (first, "2" if comes_back else "1:2", tmp_path, *elastic(1, 1, **LONG), "--ckpt_path=last")
    stays, lost = (torchrun(machine, *arguments) for machine in machines)
    wait_for_step(20, stays, tmp_path, "gpt")
    second.signal(signal.SIGKILL)
    lost.wait()
    others = [torchrun(second, *arguments)] if comes_back else []
    for process, machine in zip((stays, *others), machines, strict=False):
        assert process.wait(120) == 0, (tmp_path / f"stderr_{machine.name}").read_text()
    assert_same_run(tmp_path, alone, "gpt", rows_lost=40, same_processes=False)
    printed = (tmp_path / f"stderr_{first.name}").read_text()
    assert re.search("^lightning-tfm: error: lost rank . on", printed, re.MULTILINE)
    assert [start["processes"] for start in Run(folder(tmp_path, "gpt")).starts] == [2, 2 if comes_back else 1]


def test_a_second_machine_joins_a_sweep_and_its_trial_is_taken_up_when_it_is_lost(machines, tmp_path):
    alone, together = new_folders(tmp_path, "alone", "together")
    child = start("sweep", tiny(alone), cwd=alone, forks=True)
    both = []
    for machine, name in zip(machines, ("first", "second"), strict=True):
        (cwd,) = new_folders(together, name)
        arguments = ("sweep", tiny(cwd), "--output", together / "runs/tiny")
        both.append(start(*arguments, cwd=cwd, network=machine.network, forks=True))
    started = together / "runs/tiny/trial_0002/provenance.json"
    while not started.is_file():  # by the machine that does not train the first trial
        assert all(other.process.is_alive() for other in both), [other.err.read_text() for other in both]
        time.sleep(0.01)
    assert not (together / "runs/tiny/trial_0001/summary.json").is_file()
    lost = next(number for number, machine in enumerate(machines) if trains(machine, together / "runs/tiny/trial_0002"))
    machines[lost].signal(signal.SIGKILL)
    both[lost].process.join()
    both[1 - lost].finish()
    child.finish()
    assert (together / "runs/tiny/trials.csv").read_text() == (alone / "runs/sweeps/tiny/trials.csv").read_text()


def trains(machine, run):
    """Return whether a process of a machine holds the lock of a trial."""
    links = [link for pid in machine.pids() for link in Path(f"/proc/{pid}/fd").glob("*")]
    return any(os.path.realpath(link) == str(run.with_suffix(".lock").resolve()) for link in links)


SRUN = """\
#!/usr/bin/env bash
# Start the command on both machines, each of which is a task of a job.
[ "$1" = --kill-on-bad-exit=1 ] && shift
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 ip netns exec "${MACHINES}_$node" "$@" &
done
wait -n || status=$?
wait -n || status=$?
exit ${status:-0}
"""


@pytest.mark.parametrize("signum", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_job_of_slurm_is_requeued_and_goes_on(signum, alone, machines, tmp_path):
    """SLURM itself is replaced by its environment variables, `srun` and `scontrol`; the signal is real.

    SIGUSR1 announces the time limit, after which the run requeues the job, and SIGTERM a preemption, after which SLURM
    itself requeues it.
    """
    together, programs = new_folders(tmp_path, "together", "programs")
    for name, program in (("srun", SRUN), ("scontrol", f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n')):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    environment = JOINED | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "lightning-tfm",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "10.0.0.[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "MACHINES": machines[0].name.removesuffix("_0"),
    }
    command = ["bash", str(EXPERIMENTS / "slurm.sbatch"), *map(str, elastic(1, 1, **LONG)[1:])]
    for status in (128 + signum, 0):
        with open(together / "stderr", "a") as output:
            job = subprocess.Popen(command, cwd=together, env=environment, stdout=output, stderr=output)
        if status:
            wait_for_step(20, job, together, "gpt")
            for machine in machines:
                machine.signal(signum)
        assert job.wait(120) == status, (together / "stderr").read_text()
    requeued = (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
    assert requeued == ("requeue 4242\n" if signum == signal.SIGUSR1 else "")
    printed = (together / "stderr").read_text()
    assert printed.count(f"lightning-tfm: interrupted by {signum.name}, saved after step ") == 2, "on each machine"
    assert printed.count("lightning-tfm: requeued job 4242\n") == (signum == signal.SIGUSR1)
    assert "Traceback" not in printed
    assert_same_run(together, alone, "gpt", same_processes=False)
    assert [path.name for path in (together / "runs/copy_gpt").iterdir()] == ["version_0"]
