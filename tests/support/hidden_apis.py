"""Run `lightning-tfm` commands in an interpreter that hides what macOS and Windows lack.

Names are hidden only from imports in `lightning_tfm`, `datamodules` and `benchmarks`: Python, torch and Lightning have
platform-specific code, which they select by the actual platform. The following are hidden or raise an error:

- modules that Windows lacks;
- functions and signals that macOS or Windows lacks;
- `/proc`, for `pathlib`;
- opening a folder as a file, relative paths to another drive and `ctypes.CDLL(None)`, which fail on Windows.

Opening a text file without an encoding also raises an error, because the default on Windows is not UTF-8.

    python -X warn_default_encoding tests/support/hidden_apis.py '[["fit", "--config", "copy_gpt.yaml"]]'
"""

import builtins
import importlib
import json
import os
import pathlib
import pkgutil
import sys
import warnings
from types import ModuleType

PACKAGES = ("lightning_tfm", "datamodules", "benchmarks")

MODULES = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "syslog"}
MODULES |= {"termios", "tty"}

OS = """
chown chroot confstr ctermid fchmod fchown fdatasync fork forkpty fpathconf fstatvfs getegid geteuid getgid getgroups
getloadavg getpgid getpgrp getpriority getresgid getresuid getsid getuid initgroups killpg lchown lockf login_tty
major makedev memfd_create minor mkfifo mknod nice openpty pathconf pidfd_open pipe2 posix_fadvise posix_fallocate
posix_openpt posix_spawn posix_spawnp pread preadv pwrite pwritev readv register_at_fork sched_get_priority_max
sched_getaffinity sched_getparam sched_setaffinity sched_setscheduler sched_yield sendfile setegid seteuid setgid
setgroups setpgid setpriority setregid setresgid setresuid setreuid setsid setuid splice statvfs sync sysconf tcgetpgrp
tcsetpgrp ttyname uname wait wait3 wait4 waitid WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG writev
O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE
"""
"""Names of `os` that exist on Linux, but not on Windows or macOS."""

SIGNAL = """
SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN
Handlers Signals default_int_handler getsignal raise_signal set_wakeup_fd signal strsignal valid_signals
"""
"""Names of `signal` that exist on Windows."""


class RestrictedModule(ModuleType):
    """Proxy of a module that hides some names and replaces others."""

    def __init__(self, module, hidden=(), **changed):
        super().__init__(module.__name__)
        self.__dict__.update(changed)
        self._module, self._hidden = module, frozenset(hidden)

    def __getattr__(self, name):
        if name in self._hidden:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r} here")
        return getattr(self._module, name)


def open_file(path, flags, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, flags, *args, **kwargs)


def relpath(path, start=None):
    raise ValueError("path is on mount 'D:', start on mount 'C:'")


def load_library(name):
    raise TypeError("expected a name")


def hide():
    """Hide the names from our packages, which must not have been imported yet."""
    import ctypes
    import signal

    changed = {
        "ctypes": RestrictedModule(ctypes, CDLL=load_library),
        "os": RestrictedModule(os, OS.split(), open=open_file, path=RestrictedModule(os.path, relpath=relpath)),
        "signal": RestrictedModule(signal, set(dir(signal)) - set(SIGNAL.split())),
        "sys": RestrictedModule(sys, platform="win32"),
    }
    import_module = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        if importer.partition(".")[0] in PACKAGES and level == 0:
            if name.partition(".")[0] in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in changed:
                return changed[name]
        return import_module(name, globals, locals, fromlist, level)

    builtins.__import__ = imported

    def without_proc(function):
        def guarded(path, *args, **kwargs):
            if str(path).startswith("/proc"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *args, **kwargs)

        return guarded

    for name in ("open", "stat"):
        setattr(pathlib.Path, name, without_proc(getattr(pathlib.Path, name)))
    pattern = rf"({'|'.join(PACKAGES)})(\.|$)"
    warnings.filterwarnings("error", category=EncodingWarning, module=pattern)


def main():
    hide()
    commands = json.loads(sys.argv[1])
    if not commands:
        for package in map(importlib.import_module, PACKAGES):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
                print(module.name)
    for command in commands:
        from lightning_tfm.__main__ import main as run

        sys.argv = ["lightning-tfm", *command]
        try:
            run()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()
